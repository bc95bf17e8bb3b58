"use strict";
// What all pages do, and what their scripts share.
const by = (id) => document.getElementById(id);
const SVG = (() => {
  const made = document.createElement("template");
  made.innerHTML = "<svg></svg>";
  return made.content.firstChild.namespaceURI;
})();
(function () {
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
})();
