// The playground: Ctrl Enter runs.
(() => {
  "use strict";
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !event.target.closest("#request")) return;
    event.preventDefault();
    document.querySelector("[data-run]").click();
  });
})();
