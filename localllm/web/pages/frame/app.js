// For every page: keyboard shortcuts and their list, copying, a key in clear, and the notice that the server is unreachable.
// Everything else is done by the markup and htmx; a page that needs more has a file of its own.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  document.documentElement.classList.add("scripted");

  // Single keys work only outside of text fields: "?" lists them, "g" and a number opens a page.
  let going = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (event.key === "?") find("#help")?.showModal();
    else if (event.key === "g") going = event.timeStamp;
    else if (event.timeStamp - going < 1500) document.querySelectorAll(".nav a")[event.key - 1]?.click();
  });

  // A button with data-copy copies the element that it names, or the code beside it.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const name = button.dataset.copy;
    const source = name ? document.getElementById(name) : button.closest(".code").querySelector("code");
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch { // without https the clipboard is closed to scripts, but not to a selection
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    const said = button.firstChild; // keep the text for screen readers
    said.textContent = "Copied";
    setTimeout(() => (said.textContent = "Copy"), 1500);
  });

  // A button with data-show shows what is typed into a field for a password, until the form is sent.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-show]");
    if (!button) return;
    const field = document.getElementById(button.dataset.show);
    const shows = field.type === "password";
    field.type = shows ? "text" : "password";
    button.setAttribute("aria-pressed", shows);
    field.form.onsubmit = () => { field.type = "password"; };
  });

  // The live connection shows whether the server is reachable, and whether this browser is still logged in.
  const setGone = (gone, isOut = false) => {
    find("#connection").hidden = !gone || isOut;
    find("#logged-out").hidden = !isOut;
  };
  document.addEventListener("htmx:error", () => setGone(true));
  document.addEventListener("htmx:sse:error", (event) => setGone(true, event.detail.status === 401));
  document.addEventListener("htmx:sse:after:connection", (event) => event.target.id === "live" && setGone(false));
  document.addEventListener("asleep", () => { // connecting again would start the server, without anybody asking
    find("#connection").textContent = "The server has stopped because it was idle. Reload this page to connect again.";
    setGone(true);
  });
  document.addEventListener("ready", () => location.reload());
})();
