"use strict";
(function () {
  const by = (id) => document.getElementById(id);
  const root = document.documentElement;
  root.classList.add("scripted");

  // The theme: as the system has it, light, dark. A page from a file may not keep it.
  const THEMES = ["auto", "light", "dark"];
  function dress(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    by("theme").textContent = "theme: " + theme;
  }
  let theme = "auto";
  try { theme = localStorage.getItem("gpumem-theme") || "auto"; } catch (error) { /* nothing is kept */ }
  dress(THEMES.includes(theme) ? theme : "auto");
  by("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    dress(theme);
    try { localStorage.setItem("gpumem-theme", theme); } catch (error) { /* nothing is kept */ }
  });

  // Filter and order of the results, and of the tests' sections below them.
  const body = document.querySelector("#results tbody");
  const tests = by("tests");
  const rows = Array.from(body.rows, (row, place) => {
    const link = row.cells[0].querySelector("a");
    const section = by(link.getAttribute("href").slice(1));
    return { row, place, section, name: link.textContent, words: section.querySelector("dd").textContent.toLowerCase() };
  });
  function filter() {
    const words = by("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = by("verdict").value, kind = by("kind").value;
    let shown = 0;
    for (const one of rows) {
      const fits = words.every((word) => one.words.includes(word)) &&
        (!verdict || one.row.dataset.verdict === verdict) && (!kind || one.row.dataset.kind === kind);
      one.row.hidden = one.section.hidden = !fits;
      shown += fits;
    }
    by("count").textContent = shown + " of " + rows.length;
  }
  function figure(one, column) {
    const value = one.row.cells[column + 1].dataset.v;
    return value === undefined ? null : Number(value);
  }
  let upwards = false;
  function order() {
    const wanted = by("order").value;
    const sign = upwards ? -1 : 1;
    const sorted = rows.slice().sort((a, b) => {
      if (wanted === "") return sign * (a.place - b.place);
      if (wanted === "name") return sign * a.name.localeCompare(b.name, undefined, { numeric: true });
      const x = figure(a, Number(wanted)), y = figure(b, Number(wanted));
      if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place;
      return sign * (y - x) || a.place - b.place;
    });
    for (const one of sorted) {
      body.append(one.row);
      tests.append(one.section);
    }
    for (const heading of document.querySelectorAll("th")) {
      if (heading.dataset.order === wanted) {
        const down = wanted === "name" || wanted === "" ? upwards : !upwards;
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      } else heading.removeAttribute("aria-sort");
    }
  }
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["text", "verdict", "kind"]) by(id).addEventListener("input", filter);
  by("order").addEventListener("input", () => { upwards = false; order(); });
  for (const heading of document.querySelectorAll("th")) {
    heading.addEventListener("click", () => {
      upwards = by("order").value === heading.dataset.order && !upwards;
      by("order").value = heading.dataset.order;
      order();
    });
  }
  filter();

  // What shows where the pointer rests on a point, made once a section is opened: a page may have thousands.
  function tips(section) {
    for (const line of section.querySelectorAll("[data-tips]")) {
      const at = line.getAttribute("d").match(/[\d.]+ [\d.]+/g);
      line.dataset.tips.split("|").forEach((tip, index) => {
        const dot = document.createElementNS(line.namespaceURI, "circle"), title = document.createElementNS(line.namespaceURI, "title");
        const [x, y] = at[index].split(" ");
        dot.setAttribute("class", "tip");
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", y);
        title.textContent = tip;
        dot.append(title);
        line.parentNode.append(dot);
      });
      delete line.dataset.tips;
    }
  }
  tests.addEventListener("toggle", (event) => tips(event.target), true);

  // A link to a test opens its section, whatever the filter hides.
  function open() {
    const section = location.hash.length > 1 ? by(location.hash.slice(1)) : null;
    if (section !== null && section.tagName === "DETAILS") {
      section.hidden = false;
      section.open = true;
      section.scrollIntoView();
    }
  }
  window.addEventListener("hashchange", open);
  open();
})();
