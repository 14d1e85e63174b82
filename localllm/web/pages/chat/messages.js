// Inside a message: maths, the reasoning clock, long lines of code, previews, files. Around it: jumps.
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
    new MutationObserver(() => {
      drawMaths();
      follow();
    }).observe(messages, { childList: true, subtree: true, attributeFilter: ["data-drawn"] });
    drawMaths();
  }

  setInterval(() => {
    for (const clock of document.querySelectorAll("[data-clock]")) {
      clock.since ??= performance.now() - clock.dataset.clock * 1000;
      clock.textContent = `${Math.round((performance.now() - clock.since) / 1000)} s`;
    }
  }, 1000);

  const wrap = (button) => button.setAttribute("aria-pressed", button.closest(".code").classList.toggle("code--wrapped"));

  // The canvas is one preview beside the chat. It stays while the chat goes on: each block that can be previewed is a
  // version, and a new one is shown as soon as it is written. A preview runs in a frame that has neither our origin nor
  // a network; its page is made from the stored message.
  const canvas = find("#canvas");
  const blocks = () => [...document.querySelectorAll("[data-preview]")];
  const addressOf = (button) => `${location.pathname}/m/${button.closest(".message").id.slice(2)}/preview/${button.dataset.preview}`;
  let drawn = "", written = "", opener = null;
  function draw(src) {
    if (src !== drawn) {
      canvas.querySelector("iframe")?.remove();
      if (src) canvas.append(Object.assign(document.createElement("iframe"), { title: "Preview", sandbox: "allow-scripts", src }));
    }
    [drawn, canvas.hidden] = [src, !src];
    const all = blocks(), at = all.findIndex((button) => addressOf(button) === src);
    all.forEach((button, n) => {
      if ((button.ariaExpanded === "true") === (n === at)) return; // what changes nothing must not be observed
      button.ariaExpanded = n === at;
      button.textContent = n === at ? "Close preview" : "Preview";
    });
    canvas.querySelector("[role=status]").textContent = at < 0 ? "" : `${at + 1} of ${all.length}`;
    for (const step of canvas.querySelectorAll("[data-step]")) step.disabled = !all[at + Number(step.dataset.step)];
  }
  function preview(button) {
    const src = addressOf(button);
    draw(src === drawn ? "" : src);
    opener = button;
    if (drawn && getComputedStyle(canvas).position === "fixed") canvas.querySelector("[data-close]").focus();
  }
  function step(button) {
    const all = blocks();
    draw(addressOf(all[all.findIndex((each) => addressOf(each) === drawn) + Number(button.dataset.step)]));
  }
  function closeCanvas() {
    draw("");
    opener?.focus();
  }
  canvas?.addEventListener("keydown", (event) => event.key === "Escape" && (event.stopPropagation(), closeCanvas()));
  function follow() {
    const last = blocks().at(-1), before = written;
    written = last ? addressOf(last) : "";
    if (drawn) draw(written && written !== before ? written : drawn);
  }

  // Reading aloud has a script of its own, loaded once the browser has a voice of this machine: another voice would send
  // the text to its maker.
  const speech = window.speechSynthesis;
  function findVoices() {
    const found = speech?.getVoices().some((voice) => voice.localService);
    document.documentElement.classList.toggle("spoken", Boolean(found));
    if (found && messages && !find("#aloud")) document.head.append(Object.assign(document.createElement("script"), { id: "aloud", src: messages.dataset.aloud }));
  }
  speech?.addEventListener?.("voiceschanged", findVoices);
  findVoices();

  // Jumps: to the newest message, and to a question of the outline if it is on the page.
  const scroller = find("#chat-scroll");
  const newest = find("#newest");
  if (newest) {
    const place = () => (newest.hidden = !find(".message") || scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 160);
    scroller.addEventListener("scroll", place, { passive: true });
    new ResizeObserver(place).observe(scroller.firstElementChild);
  }
  function toNewest() {
    const later = find("[data-later]");
    if (later) return later.click();
    scroller.scrollTop = scroller.scrollHeight;
    [...document.querySelectorAll(".message")].at(-1)?.focus({ preventScroll: true });
  }
  function jump(link, event) {
    const message = document.getElementById(link.hash.slice(1));
    if (!message) return;
    event.preventDefault();
    find("#manage").close();
    scroller.scrollTop += message.getBoundingClientRect().top - scroller.getBoundingClientRect().top - 16;
    message.focus({ preventScroll: true });
  }

  const acts = { "[data-wrap]": wrap, "[data-preview]": preview, "[data-step]": step, "#canvas [data-close]": closeCanvas, "#newest": toNewest, "[data-jump]": jump };
  document.addEventListener("click", (event) => {
    for (const [selector, act] of Object.entries(acts)) {
      const found = event.target.closest(selector);
      if (found) act(found, event);
    }
    event.target.closest(".more__item")?.closest(".more").hidePopover();
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
  find("#composer-camera")?.addEventListener("change", ({ target }) => {
    const files = [...target.files];
    target.value = ""; // its file must not be sent twice
    attach(files);
  });
  // Files that are too large are not sent: the refusal could be lost while they are still on their way.
  document.addEventListener("change", (event) => {
    const size = event.target === input ? [...input.files].reduce((sum, file) => sum + file.size, 0) : 0;
    if (size < 67e6) return;
    event.stopPropagation();
    input.value = "";
    const notice = Object.assign(document.createElement("p"), { className: "notice", role: "alert" });
    notice.textContent = `Too large: ${Math.round(size / 2 ** 20)} MiB. The files may have 64 MiB together.`;
    find("#composer-error").replaceChildren(notice);
  }, true);
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
