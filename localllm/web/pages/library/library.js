// The Models page: the slider of the context, and the question before a delete as a dialog, once htmx has filled it.
(() => {
  "use strict";
  document.addEventListener("input", ({ target }) => {
    const number = target.dataset.slides && document.getElementById(target.dataset.slides);
    if (number) number.value = target.value;
  });
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
