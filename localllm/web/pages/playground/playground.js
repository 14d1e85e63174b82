// The playground: Ctrl Enter runs, Escape and the button stop the request. Folded parts stay as they were left.
(() => {
  "use strict";
  const stop = () => {
    document.querySelectorAll("#request [hx-post]").forEach((button) => htmx.trigger(button, "htmx:abort"));
    const finish = document.querySelector("[data-finish]");
    if (finish && finish.textContent === "writing") finish.textContent = "stopped";
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.querySelector("#running.htmx-request")) return stop();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !event.target.closest("#request")) return;
    event.preventDefault();
    document.querySelector("[data-run]").click();
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-stop]")) stop();
  });
  for (const fold of document.querySelectorAll("[data-fold]")) {
    const key = `playground-${fold.dataset.fold}`;
    fold.open ||= localStorage.getItem(key) === "open";
    fold.addEventListener("toggle", () => localStorage.setItem(key, fold.open ? "open" : ""));
  }
})();
