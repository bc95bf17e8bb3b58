"use strict";
(function () {
  const by = (id) => document.getElementById(id);
  document.documentElement.classList.add("scripted");

  // Filter and order of the results, and of the tests' sections below them.
  const body = document.querySelector("#results tbody");
  const rows = Array.from(body.rows, (row) => {
    const section = by(row.querySelector("a").getAttribute("href").slice(1));
    return { row, section, words: section.querySelector("dd").textContent.toLowerCase() };
  });
  function filter() {
    const words = by("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = by("verdict").value;
    let shown = 0;
    for (const entry of rows) {
      const fits = words.every((word) => entry.words.includes(word)) &&
        (!verdict || entry.row.dataset.verdict === verdict);
      entry.row.hidden = entry.section.hidden = !fits;
      shown += fits;
    }
    by("count").textContent = shown + " of " + rows.length;
  }
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["text", "verdict"]) by(id).addEventListener("input", filter);
  filter();

  // A click on a heading sorts by its column, a second one the other way. Rows without a figure come last.
  document.querySelectorAll("th").forEach((heading, column) => {
    heading.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      document.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      rows.sort((a, b) => {
        const x = a.row.cells[column], y = b.row.cells[column];
        if (x.dataset.v && y.dataset.v) return sign * (x.dataset.v - y.dataset.v);
        if (x.dataset.v || y.dataset.v) return x.dataset.v ? -1 : 1;
        return sign * x.textContent.localeCompare(y.textContent, undefined, { numeric: true });
      });
      for (const entry of rows) {
        body.append(entry.row);
        by("tests").append(entry.section);
      }
    });
  });

  // A link to a test opens its section, whatever the filter hides.
  function open() {
    const section = by(location.hash.slice(1));
    if (section !== null && section.tagName === "DETAILS") {
      section.hidden = false;
      section.open = true;
      section.scrollIntoView();
    }
  }
  window.addEventListener("hashchange", open);
  open();
})();
