// For every page: the list behind Ctrl K, and keys for lists that are filled while one types.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  const isMac = /Mac|iP/.test(navigator.platform); // there Ctrl K belongs to text fields

  // A field names its list with aria-controls; the focus stays in the field.
  const optionsOf = (field) => [...(document.getElementById(field.getAttribute?.("aria-controls"))?.querySelectorAll("[role=option]") ?? [])];
  function mark(field, option) {
    for (const each of optionsOf(field)) each.ariaSelected = each === option;
    if (option) field.setAttribute("aria-activedescendant", option.id);
    else field.removeAttribute("aria-activedescendant");
    option?.scrollIntoView({ block: "nearest" });
  }
  const choose = (options) => (options.find((each) => each.ariaSelected === "true") ?? options[0])?.click();
  let isOld = false; // the list is that of an earlier text
  let waits = false; // Enter was pressed then
  document.addEventListener("input", (event) => {
    if (event.target.matches?.("[aria-controls]")) [isOld, waits] = [true, false];
  });
  document.addEventListener("htmx:after:swap", (event) => {
    const field = document.activeElement;
    if (!field?.matches("[aria-controls]") || event.detail.ctx?.target?.id !== field.getAttribute("aria-controls")) return;
    mark(field, optionsOf(field)[0]);
    if (isOld && waits) choose(optionsOf(field));
    [isOld, waits] = [false, false];
  });

  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.altKey) return;
    if (isMac ? event.metaKey : event.ctrlKey) {
      const key = event.key.toLowerCase();
      if (key === "o" && event.shiftKey) location.href = "/";
      else if (key === "k" && !event.shiftKey) openPalette();
      else return;
      event.preventDefault();
      return;
    }
    const field = event.target;
    const options = optionsOf(field);
    if (!options.length || event.shiftKey) return;
    const at = options.findIndex((each) => each.ariaSelected === "true");
    if (event.key === "ArrowDown") mark(field, options[(at + 1) % options.length]);
    else if (event.key === "ArrowUp") mark(field, options.at(at < 1 ? -1 : at - 1));
    else if (event.key === "Enter" && isOld) waits = true;
    else if (event.key === "Enter") choose(options);
    else if (event.key === "Escape" && !field.closest("dialog")) options[0].parentElement.remove();
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);

  const palette = find("#palette");
  function openPalette() {
    if (!palette || palette.open) return;
    palette.showModal();
    find("#palette-query").value = "";
    find("#palette-query").dispatchEvent(new Event("open"));
  }
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-palette]")) openPalette();
    if (event.target === palette) palette.close();
    if (!event.target.closest("[data-help]")) return;
    palette?.close();
    if (!find("#help").open) find("#help").showModal();
  });
})();
