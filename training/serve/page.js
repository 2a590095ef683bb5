"use strict";
// What the page can do beyond its forms: answer in place, take a dropped photograph, and show where a model looked.

const results = document.getElementById("results");
const status = document.getElementById("status");
const byText = document.getElementById("by-text");
const byPhoto = document.getElementById("by-photo");
document.documentElement.classList.add("scripted");

let asked = null; // the query that the results are of, {q} or {photo}, unless they came with the page
let running = null;

function error(line) {
  const p = document.createElement("p");
  p.className = "error";
  p.setAttribute("role", "alert");
  p.textContent = line;
  return p;
}

// The part of the page that the server makes of a query; what is refused is a line of the server's, too.
async function part(query, more, signal) {
  const address = new URLSearchParams({ as: "part", ...more });
  let options = { signal };
  if (query.photo) {
    const form = new FormData();
    form.append("photo", query.photo);
    options = { method: "POST", body: form, signal };
  } else {
    address.set("q", query.q);
  }
  const answer = await fetch(`/search?${address}`, options);
  const ours = (answer.headers.get("Content-Type") || "").startsWith("text/html");
  if (!ours) return error(`The server refuses it (${answer.status}).`);
  const template = document.createElement("template");
  template.innerHTML = await answer.text();
  return template.content;
}

async function search(query) {
  if (running) running.abort();
  const mine = (running = new AbortController());
  status.textContent = "Searching …";
  const limit = byPhoto ? Number(byPhoto.dataset.bytes) : 0;
  let found;
  if (query.photo && query.photo.size > limit) {
    found = error(`The photograph has more than ${limit / 2 ** 20} MB.`);
  } else {
    try {
      found = await part(query, { k: document.getElementById("k").value || "10" }, mine.signal);
    } catch (problem) {
      if (problem.name === "AbortError") return;
      found = error("The server does not answer; is vse-serve still running?");
    }
  }
  if (mine !== running) return;
  asked = query;
  results.replaceChildren(found);
  const n = results.querySelectorAll(".card").length;
  status.textContent = n ? `${n} results` : "No results";
  const heading = results.querySelector("h2");
  if (heading) heading.focus();
  const address = query.photo ? "/" : `/search?${new URLSearchParams({ q: query.q, k: document.getElementById("k").value })}`;
  history.replaceState(null, "", address);
}

async function look(button) {
  const card = button.closest(".card");
  let drawing = card.querySelector(".looked");
  if (!drawing) {
    const query = asked || { q: new URL(button.href).searchParams.get("q") };
    drawing = document.createElement("div");
    drawing.className = "looked looks";
    card.append(drawing);
    try {
      drawing.append(await part(query, { run: button.dataset.run, hit: button.dataset.hit }));
    } catch {
      drawing.append(error("The server does not answer; is vse-serve still running?"));
    }
  } else {
    drawing.hidden = !drawing.hidden;
  }
  button.setAttribute("aria-expanded", String(!drawing.hidden));
}

byText.addEventListener("submit", (event) => {
  event.preventDefault();
  search({ q: document.getElementById("q").value });
});

results.addEventListener("click", (event) => {
  const button = event.target.closest(".look");
  if (!button) return;
  event.preventDefault();
  look(button);
});

results.addEventListener("keydown", (event) => {
  if (event.key === " " && event.target.matches("a.look")) {
    event.preventDefault();
    look(event.target);
  }
});

if (byPhoto) {
  const input = document.getElementById("photo");
  byPhoto.addEventListener("submit", (event) => {
    event.preventDefault();
    search({ photo: input.files[0] });
  });
  input.addEventListener("change", () => {
    if (input.files.length) search({ photo: input.files[0] });
  });
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
    if (!event.dataTransfer.files.length) return;
    input.files = event.dataTransfer.files;
    search({ photo: event.dataTransfer.files[0] });
  });
}
