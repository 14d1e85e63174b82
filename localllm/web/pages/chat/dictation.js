// Dictation: the microphone is recorded here and sent to this server as WAV; the text is put at the caret. A click
// starts and a click ends; a button that is held down records until it is released.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  const button = find("#dictate"), text = find("#composer-message"), level = find(".dictate__level");
  const RATE = 16000, MOST_S = 1800, HOLD_MS = 400, QUIET_DB = -60;
  const REFUSED = {
    NotAllowedError: "The browser has refused the microphone. Allow it for this page, then try again.",
    NotFoundError: "No microphone was found. Connect one, then try again.",
    NotReadableError: "The microphone does not answer. Another program may be using it.",
  };
  const STATES = { idle: "Dictate", asking: "Cancel dictation", recording: "Stop and transcribe", writing: "Cancel transcription" };
  let state = "idle", cancel = () => {}, recorder;

  const tell = (words) => {
    const notice = Object.assign(document.createElement("p"), { className: "notice", role: "alert", textContent: words });
    find("#composer-error").replaceChildren(...(words ? [notice] : []));
  };
  function enter(next, shown = "") {
    state = next;
    button.title = STATES[next] + (next === "idle" ? ": click, or hold while you speak" : "");
    button.lastElementChild.textContent = STATES[next];
    button.dataset.dictate = next;
    button.children[1].textContent = shown;
    if (next !== "idle") find("#chat-status").textContent = next === "writing" ? "Transcribing" : "Recording";
  }

  async function start() {
    tell("");
    if (!navigator.mediaDevices) return tell("Browsers give the microphone only to pages of localhost or over HTTPS: start the server with --ssl-certfile.");
    let over = false;
    cancel = () => ((over = true), enter("idle"));
    enter("asking");
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true } });
      if (over) return stream.getTracks().forEach((track) => track.stop());
      record(stream);
    } catch (problem) {
      if (over) return;
      enter("idle");
      tell(REFUSED[problem.name] ?? `The microphone cannot be used: ${problem.message}`);
    }
  }

  // The bar shows how loud the microphone is, in decibels: a quiet room leaves it short, a dead microphone empty.
  function drawLevel(stream) {
    const context = new AudioContext(), meter = context.createAnalyser(), samples = new Float32Array(meter.fftSize);
    context.createMediaStreamSource(stream).connect(meter);
    const draw = () => {
      if (context.state === "closed") return;
      meter.getFloatTimeDomainData(samples);
      const loud = 10 * Math.log10(samples.reduce((sum, each) => sum + each * each, 0) / samples.length);
      level.style.transform = `scaleX(${Math.max(0, Math.min(1, 1 - loud / QUIET_DB))})`;
      requestAnimationFrame(draw);
    };
    draw();
    return context;
  }

  function record(stream) {
    const parts = [], since = performance.now(), heard = drawLevel(stream);
    let kept = true;
    recorder = new MediaRecorder(stream);
    const tick = () => {
      const seconds = Math.floor((performance.now() - since) / 1000);
      enter("recording", `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`);
      if (seconds >= MOST_S) recorder.stop();
    };
    const clock = setInterval(tick, 500);
    recorder.ondataavailable = (event) => parts.push(event.data);
    recorder.onstop = () => { // also when the microphone is unplugged
      clearInterval(clock);
      heard.close();
      stream.getTracks().forEach((track) => track.stop());
      if (kept) write(new Blob(parts));
      else enter("idle");
    };
    cancel = () => {
      kept = false;
      recorder.stop();
    };
    recorder.start();
    tick();
  }

  // Samples are 16-bit, the mean of the channels; the browser resamples as it decodes its own recording.
  function wav(sound) {
    const channels = Array.from({ length: sound.numberOfChannels }, (_, each) => sound.getChannelData(each));
    const head = "RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0";
    const view = new DataView(new ArrayBuffer(44 + 2 * sound.length));
    for (let at = 0; at < 44; at++) view.setUint8(at, head.charCodeAt(at));
    view.setUint32(4, 36 + 2 * sound.length, true);
    view.setUint32(40, 2 * sound.length, true);
    for (let at = 0; at < sound.length; at++) {
      const mean = channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length;
      view.setInt16(44 + 2 * at, Math.max(-1, Math.min(1, mean)) * 32767, true);
    }
    return new Blob([view], { type: "audio/wav" });
  }

  async function write(recording) {
    const leave = new AbortController();
    cancel = () => leave.abort();
    enter("writing", "…");
    try {
      const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recording.arrayBuffer());
      const body = new FormData();
      body.append("sound", wav(sound), "dictation.wav");
      const answer = await fetch("/chats/dictate", { method: "POST", body, headers: { "HX-Request": "true" }, signal: leave.signal });
      const said = (await answer.text()).trim();
      if (!answer.ok) find("#composer-error").innerHTML = said; // as htmx shows a refusal
      else if (!said) tell("No speech was heard.");
      else put(said);
    } catch (problem) {
      if (problem.name === "EncodingError") tell("Nothing was recorded.");
      else if (problem.name !== "AbortError") tell("Not transcribed: the server is away.");
    }
    enter("idle");
  }

  function put(said) {
    const before = text.value.slice(0, text.selectionStart);
    text.focus();
    document.execCommand("insertText", false, (/\S$/.test(before) ? " " : "") + said); // undo takes it back
    find("#chat-status").textContent = "Transcribed";
  }

  let pressed = 0; // when the press that started the recording began; 0: no press has
  button.addEventListener("pointerdown", (event) => {
    pressed = 0;
    if (state !== "idle" || event.button) return;
    pressed = event.timeStamp;
    button.setPointerCapture(event.pointerId); // a finger may slide off the button
    start();
  });
  for (const end of ["pointerup", "pointercancel"]) button.addEventListener(end, (event) => {
    if (pressed && event.timeStamp - pressed >= HOLD_MS && state === "recording") recorder.stop();
  });
  button.addEventListener("contextmenu", (event) => state === "idle" || event.preventDefault()); // of a long touch
  button.addEventListener("click", (event) => {
    if (pressed && event.detail) pressed = 0; // its press has done it
    else if (state === "idle") start();
    else if (state === "recording") recorder.stop();
    else cancel();
  });
  document.addEventListener("keydown", (event) => { // before Esc stops the reply
    if (event.key !== "Escape" || state === "idle") return;
    event.stopImmediatePropagation();
    cancel();
  }, true);
})();
