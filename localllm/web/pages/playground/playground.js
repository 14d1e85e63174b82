// The playground: Ctrl Enter runs, Escape and the button stop the request.
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
})();
