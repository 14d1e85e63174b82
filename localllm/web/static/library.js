// The Models page: the question before a delete, in the dialog that htmx has filled.
(() => {
  "use strict";
  const dialog = document.querySelector("#question-dialog");
  if (!dialog) return;
  document.addEventListener("htmx:after:swap", () => {
    if (dialog.querySelector("#question").childElementCount && !dialog.open) dialog.showModal();
  });
  dialog.addEventListener("close", () => dialog.querySelector("#question").replaceChildren());
  dialog.addEventListener("click", (event) => {
    if (!event.target.closest("[data-close]")) return;
    event.preventDefault();
    dialog.close();
  });
})();
