// The chat page: keys and drafts in the composer, the drawer, scrolling with a reply.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);
  const text = find("#composer-message");
  let following = !find("#empty-chat, .panel");

  // A message that is sent while a reply is being written waits for its end; typing or Esc takes it back, and Enter
  // once more stops the reply and sends it now.
  let queued = false;
  const queue = (on) => {
    queued = on;
    text.form.classList.toggle("composer--queued", on);
    if (on) find("#chat-status").textContent = "Sent when the reply ends";
  };
  if (text) new MutationObserver(() => {
    if (!queued || find("[data-stop]")) return;
    queue(false);
    if (find("[data-send]")) text.form.requestSubmit(find("[data-send]"));
  }).observe(text.form, { childList: true, subtree: true });

  // Composer: Enter sends, Shift+Enter inserts a line break, Esc closes the drawer or stops the reply.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target === text && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (text.value.trim() && find("[data-send]")) text.form.requestSubmit(find("[data-send]"));
      else if (queued) find("[data-stop]")?.click();
      else if (text.value.trim() && find("[data-stop]")) queue(true);
    } else if (event.key === "Escape") {
      const edit = event.target.closest(".edit");
      if (edit) return event.target.value === event.target.defaultValue && edit.querySelector("[data-cancel]").click();
      if (queued) return queue(false);
      if (!closeDrawer()) find("[data-stop]")?.click();
    } else if (event.key === "Enter" && event.target.matches(".edit__text") && !event.isComposing) {
      const isAnswer = event.target.closest(".message--assistant");
      if (isAnswer ? !event.ctrlKey && !event.metaKey : event.shiftKey) return;
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  });

  // The drawer opens at a field, counts what is filled in, and marks a value out of range.
  function openDrawer(field) {
    for (let at = field.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
    field.focus();
  }
  function closeDrawer() {
    const drawer = find(".drawer[open]");
    if (!drawer) return false;
    drawer.open = false;
    drawer.querySelector("summary").focus();
    return true;
  }
  document.addEventListener("click", (event) => {
    for (const drawer of document.querySelectorAll(".drawer[open]")) {
      if (!drawer.contains(event.target)) drawer.open = false;
    }
    if (event.target.closest("[data-close-drawer]")) closeDrawer();
    if (event.target.closest("[data-behaviour]")) {
      event.preventDefault();
      openDrawer(find("#system"));
    }
  });
  const isWrong = (field) => !field.validity.valid && !(field.validity.stepMismatch && field.step !== "1");
  document.addEventListener("input", (event) => {
    if (!event.target.closest("#sampling")) return;
    const fields = [...document.querySelectorAll("#sampling .field__input:not([name^=preset])")];
    const set = fields.filter((field) => field.value.trim() || field.validity.badInput).length;
    find("[data-num-set]").textContent = set ? `· ${set} set` : "";
    event.target.ariaInvalid = isWrong(event.target);
  });
  document.addEventListener("submit", (event) => {
    const wrong = event.target.id === "composer" && [...document.querySelectorAll("#sampling [type=number]")].find(isWrong);
    if (!wrong || event.submitter?.matches("[data-stop]")) return;
    event.preventDefault();
    event.stopPropagation();
    wrong.ariaInvalid = true;
    openDrawer(wrong);
    wrong.reportValidity();
  }, true);

  if (text) {
    // A draft stays in the tab until its message is sent.
    const draftOf = () => `draft:${find("#composer-conversation").value}`;
    let draft = draftOf();
    text.value ||= sessionStorage.getItem(draft) ?? "";

    // The server counts the message once it may not fit: a character has at most three tokens, and rarely one.
    const count = () => {
      const meter = find("#context-meter meter");
      const free = meter ? meter.max - meter.value : text.form.dataset.context;
      if (find("#composer-fit > *") || find("#attachments .file") || text.value.length * 3 > free) htmx.trigger(text, "count");
    };
    document.addEventListener("htmx:after:swap", (event) => {
      if (event.detail.ctx?.sourceElement?.matches?.("#composer-file, .file__remove, .file__detail, #model, #composer-action, [formaction='/chats/attach/first']")) count();
    });

    // The text is cleared when it is sent. It returns if it is refused, and is sent again once an absent server answers.
    let sent = "", waits = false, stop, bubble, action;
    const isSend = (event) => {
      const from = event.detail.ctx?.sourceElement;
      return from?.id === "composer" || (from?.name === "full" && from.formAction.endsWith("/chat"));
    };
    const say = (words) => {
      const notice = Object.assign(document.createElement("p"), { className: "notice", role: "alert", textContent: words });
      find("#composer-error").replaceChildren(...(words ? [notice] : []));
    };
    text.addEventListener("input", () => {
      queue(false);
      sessionStorage.setItem(draftOf(), text.value);
      if (waits) say("");
      waits = false;
      count();
    });
    document.addEventListener("htmx:before:request", (event) => {
      if (!isSend(event)) return;
      text.dispatchEvent(new Event("htmx:abort")); // of a count; it must not bubble to the form
      [draft, sent, text.value, following] = [draftOf(), text.value, "", true];
      // Its bubble and Stop are drawn at once; the server's own replace them. A click on this Stop waits for that one.
      [stop, bubble] = find("#sending").content.cloneNode(true).children;
      const { body } = event.detail.ctx.request;
      bubble.lastChild.textContent = body.get("message").trim() || body.get("example");
      action = find("#composer-action");
      action.replaceWith(stop);
      find("#messages").append(bubble);
    });
    document.addEventListener("click", (event) => event.target.closest("[data-stop=later]")?.classList.add("stops"));
    for (const end of ["after:request", "finally:request"]) document.addEventListener(`htmx:${end}`, (event) => {
      if (!isSend(event)) return;
      bubble.remove();
      if (end[0] === "a" && event.detail.ctx.response.raw.ok) return;
      if (stop.isConnected) stop.replaceWith(action);
      if (stop.matches(".stops")) find("[data-stop]")?.click();
    });
    document.addEventListener("htmx:after:request", (event) => {
      if (isSend(event) && event.detail.ctx.response?.raw.ok) sessionStorage.removeItem(draft);
    });
    const giveBack = () => {
      text.value ||= sent;
      text.focus();
    };
    document.addEventListener("htmx:response:error", (event) => isSend(event) && giveBack());
    document.addEventListener("htmx:error", (event) => {
      if (!isSend(event)) return;
      giveBack();
      waits = true;
      say("Not sent: the server is away. It will be sent when it answers.");
    });
    document.addEventListener("htmx:sse:error", (event) => {
      if (waits && event.detail.status === 401) say("Not sent: you are logged out. The text is kept.");
    });
    document.addEventListener("htmx:sse:after:connection", (event) => {
      if (!waits || event.target.id !== "live" || !find("[data-send]")) return;
      waits = false;
      text.form.requestSubmit(find("[data-send]"));
    });
  }

  // The title of the tab says that a reply is being written, and that it is there while another tab is in front.
  // After a reply of half a minute the browser tells of it, if it was allowed to while the reply was being written.
  let wrote = false, unseen = false, since = 0, asks = 0;
  const tell = find("#tell");
  tell?.addEventListener("click", () => {
    tell.hidden = true;
    Notification.requestPermission();
  });
  const mark = () => {
    const writes = Boolean(find('.message[aria-busy="true"]'));
    if (writes && !wrote) {
      since = performance.now();
      if (tell && isSecureContext && window.Notification?.permission === "default") asks = setTimeout(() => { tell.hidden = false; }, 10e3);
    } else if (wrote && !writes) {
      clearTimeout(asks);
      if (tell) tell.hidden = true;
      if (document.hidden && performance.now() - since > 30e3 && window.Notification?.permission === "granted") {
        const told = new Notification(find(".head__title").textContent, { body: "The reply is done.", tag: location.pathname });
        told.onclick = () => { focus(); told.close(); };
      }
    }
    unseen = document.hidden && (unseen || (wrote && !writes));
    wrote = writes;
    const title = (writes ? "● " : unseen ? "✓ " : "") + document.title.replace(/^[●✓] /, "");
    if (title !== document.title) document.title = title;
  };
  document.addEventListener("visibilitychange", mark);
  for (const seen of [{ childList: true }, { subtree: true, attributeFilter: ["aria-busy"] }]) { // not each token
    if (find("#messages")) new MutationObserver(mark).observe(find("#messages"), seen);
  }

  // Keep the end of the conversation in view unless the user has scrolled away.
  const scroller = find("#chat-scroll");
  if (scroller) {
    const toEnd = () => following && (scroller.scrollTop = scroller.scrollHeight);
    scroller.addEventListener("scroll", () => {
      following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
    }, { passive: true });
    new MutationObserver(toEnd).observe(scroller, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(toEnd).observe(scroller);
    if (!location.hash.startsWith("#m-")) toEnd();
  }
})();
