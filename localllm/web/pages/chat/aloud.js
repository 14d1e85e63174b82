// Reading a message aloud with a voice of this machine, sentence by sentence. A reply that is being written is read as
// its sentences are completed. Code and maths are skipped.
(() => {
  "use strict";
  const speech = window.speechSynthesis, messages = document.querySelector("#messages");
  const segmenter = new Intl.Segmenter(navigator.language, { granularity: "sentence" });
  const split = (text) => [...segmenter.segment(text)].map(({ segment }) => segment.trim()).filter(Boolean);
  // The unfinished block is Markdown: it is read before its end only if it is a paragraph without maths or a table.
  const isParagraph = (text) => /^["“(*_]*\p{L}/u.test(text) && !/[$\\|]/.test(text);
  const unmarked = (text) => text.replace(/\]\([^)]*\)|[[*_~\x60]/g, "");
  let reading = null, timer = 0;

  function show() {
    for (const button of document.querySelectorAll("[data-speak]")) {
      const isRead = button.closest(".message").id === reading?.id, words = isRead ? "Stop reading" : "Read aloud";
      if (button.textContent !== words) button.textContent = words; // what changes nothing must not be observed
      if (button.matches(".action--reading")) button.hidden = !isRead;
    }
  }
  const observer = new MutationObserver(() => (timer ||= setTimeout(look, 150)));
  function hush() {
    speech.cancel();
    observer.disconnect();
    clearTimeout(timer);
    [reading, timer] = [null, 0];
    show();
  }

  // A block's sentences are queued from the one after the last that was queued.
  function queue(said) {
    const mine = reading, language = navigator.language.slice(0, 2);
    const voices = speech.getVoices().filter((each) => each.localService);
    const voice = voices.find((each) => each.lang.startsWith(language)) ?? voices[0];
    for (const part of said.slice(mine.sentence)) { // a long text in one piece is cut off by some browsers
      const utterance = Object.assign(new SpeechSynthesisUtterance(part), { voice });
      utterance.onend = utterance.onerror = () => mine.queued.delete(utterance) && reading === mine && look();
      mine.queued.add(utterance);
      speech.speak(utterance);
    }
    mine.sentence = Math.max(mine.sentence, said.length);
  }
  function words(block) {
    if (block.matches(".code, .maths")) return "";
    const text = block.cloneNode(true);
    for (const skipped of text.querySelectorAll(".code, .maths")) skipped.remove();
    return text.textContent;
  }
  function look() {
    clearTimeout(timer);
    timer = 0;
    const message = document.getElementById(reading.id), prose = message?.querySelector(".prose:not(.thinking__text)");
    if (!prose) return hush();
    const blocks = prose.children, open = document.getElementById(`${reading.id}-open`);
    for (; reading.block < blocks.length; reading.block++, reading.sentence = 0) queue(split(words(blocks[reading.block])));
    // A finished block is added before the open one is replaced; until then the open one has its text, too.
    const isStale = open === reading.open && blocks.length !== reading.blocks;
    if (!isStale) {
      [reading.open, reading.blocks] = [open, blocks.length];
      const text = open?.textContent.trimStart() ?? "";
      if (open?.matches(".open--text") && isParagraph(text)) queue(split(unmarked(text)).slice(0, -1));
    }
    if (!reading.queued.size && message.ariaBusy !== "true") return hush();
    show();
  }
  function speak(button) {
    const { id } = button.closest(".message"), wasRead = reading?.id === id;
    hush();
    if (wasRead) return;
    reading = { id, block: 0, sentence: 0, queued: new Set() };
    observer.observe(messages, { childList: true, subtree: true, characterData: true, attributeFilter: ["aria-busy"] });
    look();
  }
  addEventListener("pagehide", hush);
  document.addEventListener("click", ({ target }) => target.closest("[data-speak]") && speak(target.closest("[data-speak]")));
})();
