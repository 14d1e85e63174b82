// Reading a message aloud, with a voice of this machine.
(() => {
  "use strict";
  const speech = window.speechSynthesis;
  const voices = () => speech.getVoices().filter((voice) => voice.localService);
  let speaking = null;
  function hush() {
    speech.cancel();
    if (speaking) speaking.textContent = "Read aloud";
    speaking = null;
  }
  function speak(button) {
    const wasSpeaking = speaking === button;
    hush();
    if (wasSpeaking) return;
    const text = button.closest(".message").querySelector(".prose:not(.thinking__text)").cloneNode(true);
    for (const skipped of text.querySelectorAll(".code, .maths")) skipped.remove();
    const language = navigator.language.slice(0, 2);
    const voice = voices().find((each) => each.lang.startsWith(language)) ?? voices()[0];
    const sentences = new Intl.Segmenter(navigator.language, { granularity: "sentence" });
    const said = [...text.children].flatMap((each) => [...sentences.segment(each.textContent)].map(({ segment }) => segment.trim())).filter(Boolean);
    if (!said.length) return;
    speaking = button;
    button.textContent = "Stop";
    for (const [at, part] of said.entries()) { // a long text in one piece is cut off by some browsers
      speech.speak(Object.assign(new SpeechSynthesisUtterance(part), { voice, onend: () => at === said.length - 1 && speaking === button && hush() }));
    }
  }
  addEventListener("pagehide", hush);
  document.addEventListener("click", ({ target }) => target.closest("[data-speak]") && speak(target.closest("[data-speak]")));
})();
