"use strict";
// What the page does beyond its links and forms: take a photograph that is dropped or pasted, and open links in a dialog.

const status = document.getElementById("status");
const byPhoto = document.getElementById("by-photo");
const dialog = document.getElementById("large");
const opened = document.getElementById("opened");
const here = location.href; // the page that the server sent; a dialog has an address of its own

function errorLine(text) {
  const line = document.createElement("p");
  line.className = "error";
  line.setAttribute("role", "alert");
  line.textContent = text;
  return line;
}

// Show the contents of a link in the dialog.
async function show(href) {
  const address = new URL(href);
  address.searchParams.set("as", "part");
  const part = document.createElement("template");
  try {
    part.innerHTML = await (await fetch(address)).text();
  } catch {
    part.content.append(errorLine("The server does not answer; is vse-serve still running?"));
  }
  if (location.href !== href) return; // the dialog was closed, or shows another link
  opened.replaceChildren(part.content);
  if (!dialog.open) dialog.showModal();
}

// Show the link before or after the one in the dialog, among the links of the same kind.
function step(by) {
  const links = [...document.querySelectorAll("a.opens")];
  const current = links.find((link) => link.href === location.href);
  const same = links.filter((link) => current && link.className === current.className);
  const addresses = [...new Set(same.map((link) => link.href))];
  const next = addresses[addresses.indexOf(location.href) + by];
  if (!next) return;
  history.replaceState({ dialog: true }, "", next);
  show(next);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.opens");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  history.pushState({ dialog: true }, "", link.href);
  show(link.href);
});

dialog.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (event.target === dialog || (button && button.id === "close")) dialog.close();
  else if (button) step(Number(button.dataset.step));
});

document.addEventListener("keydown", (event) => {
  if (!dialog.open) return;
  if (event.key === "ArrowRight") step(1);
  if (event.key === "ArrowLeft") step(-1);
});

// This event comes after the dialog was closed; by then, the user may have gone forward to a dialog again.
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "popstate" && history.state && history.state.dialog) history.back();
  dialog.returnValue = "";
});

window.addEventListener("popstate", () => {
  const opens = history.state && history.state.dialog;
  if (opens && location.href !== here) show(location.href);
  else if (dialog.open) dialog.close("popstate");
  if (!opens && location.href.split("#")[0] !== here.split("#")[0]) location.reload(); // a dialog was reloaded as a page
});

document.addEventListener("submit", (event) => {
  if (!event.defaultPrevented) status.textContent = "Searching …";
});
window.addEventListener("pageshow", () => (status.textContent = "")); // also after the back button

if (byPhoto) {
  const input = document.getElementById("photo");
  const limit = Number(byPhoto.dataset.bytes);

  const search = (files) => {
    if (!files.length) return;
    input.files = files;
    byPhoto.requestSubmit(byPhoto.querySelector("button"));
  };
  byPhoto.addEventListener("submit", (event) => {
    if (input.files[0].size <= limit) return;
    event.preventDefault();
    document.getElementById("results").replaceChildren(errorLine(`The photograph has more than ${limit / 2 ** 20} MB.`));
  });
  input.addEventListener("change", () => search(input.files));
  document.addEventListener("paste", (event) => search(event.clipboardData.files));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    byPhoto.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) byPhoto.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    byPhoto.classList.remove("over");
    search(event.dataTransfer.files);
  });
}
