// Inside a message: maths, the reasoning clock, long lines of code, files.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);

  // Temml renders maths; it is loaded with the first formula. It may not run a macro for ever, or set a class, a style
  // or a link; a formula that it cannot parse stays TeX.
  const messages = find("#messages");
  let drawing = null;
  function drawMaths() {
    const formulas = messages.querySelectorAll("[data-maths]:not([data-drawn])");
    if (!formulas.length) return;
    if (!window.temml) {
      drawing ??= Object.assign(document.createElement("script"), { src: messages.dataset.temml, onload: drawMaths });
      if (!drawing.isConnected) document.head.append(drawing);
      return;
    }
    for (const formula of formulas) {
      const tex = formula.textContent;
      formula.dataset.drawn = "";
      try {
        temml.render(tex, formula, { displayMode: formula.dataset.maths === "display", throwOnError: true, annotate: true, maxExpand: 200, maxSize: [10, 20] });
      } catch {
        formula.textContent = tex;
      }
    }
  }
  if (messages) {
    new MutationObserver(drawMaths).observe(messages, { childList: true, subtree: true, attributeFilter: ["data-drawn"] });
    drawMaths();
  }

  setInterval(() => {
    for (const clock of document.querySelectorAll("[data-clock]")) {
      clock.since ??= performance.now() - clock.dataset.clock * 1000;
      clock.textContent = `${Math.round((performance.now() - clock.since) / 1000)} s`;
    }
  }, 1000);

  document.addEventListener("click", (event) => {
    const wrap = event.target.closest("[data-wrap]");
    if (wrap) wrap.setAttribute("aria-pressed", wrap.closest(".code").classList.toggle("code--wrapped"));
  });

  // Files are chosen, dropped or pasted; a long pasted text becomes a file, too.
  const input = find("#composer-file");
  if (!input) return;
  const LONG_CHARS = 8000;
  function attach(files) {
    const found = new DataTransfer();
    for (const file of files) found.items.add(file);
    input.files = found.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }
  document.addEventListener("htmx:before:request", (event) => {
    if (event.detail.ctx?.sourceElement === input) input.value = ""; // already uploading: the message must not send it again
  });
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    find("#composer").classList.add("composer--over");
  });
  const leave = () => find("#composer").classList.remove("composer--over");
  document.addEventListener("dragleave", (event) => event.relatedTarget || leave());
  document.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    leave();
    attach(event.dataTransfer.files);
  });
  find("#composer-message").addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text/plain");
    const files = event.clipboardData.files;
    if (!files.length && text.length < LONG_CHARS) return;
    event.preventDefault();
    attach(files.length ? files : [new File([text], "pasted.txt", { type: "text/plain" })]);
  });
})();
