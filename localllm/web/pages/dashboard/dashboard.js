// The dashboard: freeze and continue.
(() => {
  "use strict";
  let frozen = false;
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-freeze]");
    if (!button) return;
    if (frozen) return location.reload(); // only changes are sent, and those during the freeze were dropped
    frozen = true;
    button.setAttribute("aria-pressed", "true");
    button.textContent = "Frozen";
  });
  document.addEventListener("htmx:sse:before:message", (event) => {
    if (frozen && event.target.id === "live") event.preventDefault();
  });
})();
