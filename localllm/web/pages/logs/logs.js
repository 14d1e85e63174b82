// The logs: pause and continue, and a limit on the lines of the page.
(() => {
  "use strict";
  const MOST = 2000;
  let held = false;
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-pause]");
    if (!button) return;
    if (held) return location.reload(); // the reloaded page has the lines logged meanwhile
    held = true;
    button.setAttribute("aria-pressed", "true");
    button.textContent = "Continue";
    const live = document.querySelector(".logs__live");
    live.dataset.paused = "";
    live.querySelector("[data-live]").textContent = "Paused";
  });
  document.addEventListener("htmx:after:swap", (event) => { // another filter shows other lines, live
    if (event.detail.ctx?.sourceElement?.matches(".logs__filter")) held = false;
  });
  document.addEventListener("htmx:sse:before:message", (event) => {
    if (held && event.target.id === "log-lines") event.preventDefault();
  });
  document.addEventListener("htmx:sse:after:message", (event) => {
    const lines = event.target;
    if (lines.id !== "log-lines") return;
    while (lines.childElementCount > MOST) lines.firstElementChild.remove();
  });
})();
