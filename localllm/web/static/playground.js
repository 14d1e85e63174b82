// The playground: copying, and Ctrl Enter to run.
(() => {
  "use strict";
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !event.target.closest("#request")) return;
    event.preventDefault();
    document.querySelector("[data-run]").click();
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy-from]");
    if (!button) return;
    const code = document.getElementById(button.dataset.copyFrom);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // without https the clipboard is closed to scripts, but not to a selection
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    const said = button.firstChild;
    said.textContent = "Copied";
    setTimeout(() => (said.textContent = "Copy"), 1500);
  });
})();
