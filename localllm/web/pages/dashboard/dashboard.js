// The dashboard: freeze and continue; rows stay under the pointer.
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
  // A request that ends keeps its row, dimmed, while the pointer is among the rows: a click meets the row it was meant for.
  const keepRows = (oldNode, { newNode }) => {
    if (!oldNode.matches?.(".requests tbody:hover")) return;
    let above = null;
    for (const row of oldNode.rows) {
      let now = newNode.querySelector(`#${CSS.escape(row.id)}`);
      if (!now) {
        now = row.cloneNode(true);
        now.classList.add("requests__ended");
        now.querySelector("button").disabled = true;
        if (above) above.after(now);
        else newNode.prepend(now);
      }
      above = now;
    }
  };
  htmx.registerExtension("kept-rows", { htmx_before_morph_node: keepRows });
  document.addEventListener("mouseover", (event) => {
    if (event.target.closest(".requests tbody")) return;
    for (const row of document.querySelectorAll(".requests__ended")) row.remove();
  });
})();
