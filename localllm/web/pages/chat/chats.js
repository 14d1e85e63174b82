// Around a chat: dialogs, keys on messages, earlier messages, temporary notices.
(() => {
  "use strict";
  const find = (selector) => document.querySelector(selector);

  // A form opened from a list is shown as a dialog; submitting it closes the dialog.
  document.addEventListener("htmx:after:swap", (event) => {
    const dialog = find("#manage");
    if (event.detail.ctx?.sourceElement?.getAttribute("hx-target") === "#manage" && !dialog.open) {
      if (find("#side:popover-open")) find("#side").hidePopover();
      dialog.showModal();
    }
    for (const field of document.querySelectorAll(".edit__text:not([data-seen])")) {
      field.dataset.seen = "";
      field.focus();
      field.setSelectionRange(field.value.length, field.value.length);
      field.closest(".message").scrollIntoView({ block: "nearest" });
    }
    takePrompt(event.detail.ctx?.sourceElement);
    for (const notice of document.querySelectorAll("[data-passing]:not([data-seen])")) pass(notice);
  });
  document.addEventListener("htmx:after:request", (event) => {
    const from = event.detail.ctx?.sourceElement;
    if (from?.closest("#manage") && !from.matches("[data-stays]") && event.detail.ctx.response?.raw.ok) find("#manage").close();
  });
  find("#manage")?.addEventListener("close", (event) => event.target.replaceChildren());

  // "/" at the start of a message lists the prompts; the text of the chosen one replaces what was typed.
  const asksForPrompt = () => /^\/[^\n]{0,60}$/.test(find("#composer-message")?.value ?? "");
  document.addEventListener("input", (event) => {
    if (event.target.id !== "composer-message" || !event.isTrusted) return;
    if (asksForPrompt()) find("#prompt-list").dispatchEvent(new Event("prompts"));
    else find("#prompt-list").replaceChildren();
  });
  function takePrompt(source) {
    const list = find("#prompt-list");
    const chosen = find("[data-composer-text]");
    if (chosen) {
      const field = find("#composer-message");
      field.value = chosen.value;
      field.dispatchEvent(new Event("input", { bubbles: true }));
      field.focus();
    }
    if (list && (chosen || source !== list && list.contains(source) || !asksForPrompt())) list.replaceChildren();
  }
  document.addEventListener("click", (event) => event.target.closest("#composer") || find("#prompt-list")?.replaceChildren());

  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-choose-all]")) return;
    for (const box of event.target.form.querySelectorAll("[name=chat]")) box.checked = event.target.checked;
  });

  // An undo notice stays for some seconds, and longer while it is hovered or focused.
  function pass(notice) {
    notice.dataset.seen = "";
    const timer = setInterval(() => {
      if (notice.matches(":hover, :focus-within")) return;
      notice.remove();
      clearInterval(timer);
    }, 12000);
  }
  document.querySelectorAll("[data-passing]").forEach(pass);

  // j and k move between messages; e, r and c act on the focused one, else on the last that supports it.
  const messages = () => [...document.querySelectorAll(".message:not(.message--results)")];
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "ArrowUp" && event.target.id === "composer-message" && !event.target.value) {
      const edit = [...document.querySelectorAll(".message--user [data-key=e]")].at(-1);
      if (edit) event.preventDefault();
      edit?.click();
    }
    if (event.target.closest("input, textarea, select, dialog, [contenteditable]")) return;
    const all = messages();
    const at = all.indexOf(document.activeElement?.closest(".message"));
    if (event.key === "/") {
      event.preventDefault();
      const side = find("#side");
      if (getComputedStyle(side).display === "none") side.showPopover();
      find("#search").focus();
    } else if (event.key === "j" || event.key === "k") {
      const step = event.key === "j" ? 1 : -1;
      const next = at < 0 ? all.at(-1) : all[Math.min(Math.max(at + step, 0), all.length - 1)];
      next?.focus({ preventScroll: true });
      next?.scrollIntoView({ block: "nearest" });
    } else if ("erc".includes(event.key)) {
      const able = (at < 0 ? all.reverse() : [all[at]]).map((each) => each.querySelector(`[data-key="${event.key}"]`));
      able.find((button) => button?.checkVisibility())?.click();
    }
  });

  // Another tab has continued this chat: its messages come at once, or by a click while something is typed here.
  const news = find("#news");
  let leaf, timer;
  function compare() {
    const last = messages().at(-1);
    if (find(".message--sending")) wait();
    else if (news) {
      news.hidden = !!(last?.id === `m-${leaf}` || last?.closest(".compare") || find("[data-later]"));
      if (!news.hidden && !find("#composer-message").value && !find(".edit__text")) news.click();
    }
  }
  function wait() { // what this tab has asked for comes first
    clearTimeout(timer);
    timer = setTimeout(compare, 1000);
  }
  news?.addEventListener("click", () => { news.hidden = true; });
  document.addEventListener("chat-changed", (event) => {
    leaf = event.detail.data;
    wait();
  });

  // A dot in the list: a reply is being written in the chat, or was written since the chat was last looked at.
  let writing = [];
  const unseen = new Set((sessionStorage.unseen ?? "").split(" ").filter(Boolean));
  function dot() {
    if (!document.hidden) unseen.delete(find("#composer-conversation")?.value);
    sessionStorage.unseen = [...unseen].join(" ");
    (unseen.size ? navigator.setAppBadge?.(unseen.size) : navigator.clearAppBadge?.())?.catch(() => {});
    for (const link of document.querySelectorAll(".chats__link")) {
      const id = link.pathname.slice(3);
      link.dataset.dot = writing.includes(id) ? "writing" : unseen.has(id) ? "new" : "";
      link.ariaDescription = { writing: "A reply is being written", new: "New reply" }[link.dataset.dot] ?? null;
    }
  }
  document.addEventListener("chats-writing", ({ detail }) => {
    const now = detail.data.split(" ").filter(Boolean);
    for (const id of writing) if (!now.includes(id)) unseen.add(id);
    writing = now;
    dot();
  });
  document.addEventListener("visibilitychange", dot);
  if (find("#side")) new MutationObserver(dot).observe(find("#side"), { childList: true, subtree: true });
  dot();

  // Copying takes the text as it was written; without https only what is drawn can be taken.
  document.addEventListener("click", async (event) => {
    const link = event.target.closest("[data-copy-message]");
    if (!link || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    try {
      const text = await (await fetch(link.href)).text();
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(link.closest(".message").querySelector(".prose, .message__text"));
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    find("#chat-status").textContent = "Copied";
    link.classList.add("action--done");
    setTimeout(() => link.classList.remove("action--done"), 1500);
  });

  // Messages inserted above must not move those in view.
  const scroller = find("#chat-scroll");
  let below = null;
  document.addEventListener("htmx:before:swap", (event) => {
    if (event.detail.ctx?.sourceElement?.id === "earlier") below = scroller.scrollHeight - scroller.scrollTop;
  });
  document.addEventListener("htmx:after:swap", () => {
    if (below !== null) scroller.scrollTop = scroller.scrollHeight - below;
    below = null;
  });
})();
