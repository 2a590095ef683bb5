/* Names for the parts that the theme leaves without one, and the keyboard for tables that scroll. */
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => nav.setAttribute("aria-label", `Code block ${index + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap").forEach(wrap => { wrap.tabIndex = 0; });
});
