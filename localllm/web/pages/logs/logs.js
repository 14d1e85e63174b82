// The logs: pause and continue, and a limit on the lines of the page.
(() => {
  "use strict";
  const MOST = 2000;
  const lines = document.getElementById("log-lines");
  const live = document.querySelector(".logs__live");
  let held = false;
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-pause]");
    if (!button) return;
    if (held) return location.reload(); // the reloaded page has the lines logged meanwhile
    held = true;
    button.setAttribute("aria-pressed", "true");
    button.textContent = "Go on";
    live.dataset.paused = "";
    live.querySelector("[data-live]").textContent = "Paused";
  });
  document.addEventListener("htmx:sse:before:message", (event) => {
    if (held && event.target === lines) event.preventDefault();
  });
  document.addEventListener("htmx:sse:after:message", (event) => {
    if (event.target !== lines) return;
    while (lines.childElementCount > MOST) lines.firstElementChild.remove();
  });
})();
