"use strict";
// Shows a decode: an image with its patches, answers token by token, and the candidates of one step.
// `new Viewer(root, data)` draws it, and `addAnswer` adds the answer of another method.

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function bytes(base64) {
  const text = atob(base64);
  const out = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) out[i] = text.charCodeAt(i);
  return out;
}

const SPECIAL = /^\s*<.*>\s*$/; // a token such as </s>
const answered = ({ t, h }) => (h || SPECIAL.test(t) ? " ".repeat(t.length) : t); // spaces in place of thoughts and special tokens

// The heat map is a ramp of luminance over the image, from 0 (disagrees) to 1 (agrees); --heat in base.css has the same colors.
const DARK = [18, 20, 42, 0.25], BRIGHT = [255, 205, 60, 0.8];
const heatColor = (t) => `rgba(${DARK.map((from, k) => (from + (BRIGHT[k] - from) * Math.max(0, Math.min(1, t))).toFixed(k < 3 ? 0 : 3))})`;

function percent(p) {
  if (p === null || p === undefined) return "–";
  const v = 100 * p;
  if (v > 0 && v < 0.01) return "<0.01";
  return v >= 10 ? v.toFixed(1) : v.toFixed(2);
}

const plainly = (settings) => settings.replace("weight=agreement", "adaptive").replace(/neighbors=(\d+)/, "$1 patches").replaceAll(",", ", ");
const visible = (text) => text.replace(/\n/g, "⏎") || "·";
const number = (x) => (x === null || x === undefined ? "–" : Math.abs(x) < 0.001 && x !== 0 ? x.toExponential(1) : x.toFixed(3));

const seconds = (time) => `${time.toFixed(2)} s`;

// Images with a heat map and a highlighted patch; coordinates are pixels of the original image. With a video, one image or frame is shown
// large, and all of them in a strip.
class Stage {
  constructor(root, images, grids) {
    this.images = images; this.grids = grids; this.heat = true; this.lines = false; this.values = null; this.view = null;
    this.frames = make("div", { class: "frames" });
    this.parts = images.map((image, i) => {
      const spot = make("div", { class: "spot", hidden: true });
      const canvas = make("canvas", { "aria-hidden": "true" });
      const marks = make("div", { class: "marks-on-image" });
      const stage = make("div", { class: "stage" },
        make("img", { src: image.src, alt: images.length > 1 ? `Image ${i + 1}` : "The image that was asked about" }), canvas, marks, spot);
      stage.style.aspectRatio = `${image.w} / ${image.h}`;
      const figure = make("figure", { class: "frame" }, stage);
      this.frames.append(figure);
      return { stage, canvas, marks, spot, figure };
    });
    root.append(this.frames);
    this.clip = images.some(({ time }) => time !== undefined);
    if (this.clip) {
      this.thumbs = images.map(({ src, time }, i) => make("button", { type: "button", class: "thumb", "aria-pressed": "false", onclick: () => this.choose(i) },
        make("img", { src, alt: "" }), time === undefined ? `image ${i + 1}` : seconds(time)));
      root.append(make("div", { class: "film", role: "group", "aria-label": "Frames" }, ...this.thumbs));
      this.choose(0);
    }
    this.imageButton = make("button", { class: "quiet", type: "button", "aria-pressed": "false", title: "The image alone (o)", onclick: () => this.bare() }, "Image");
    this.fit();
    this.watch = new ResizeObserver(() => { this.fit(); this.draw(); });
    this.watch.observe(this.frames);
  }

  choose(chosen) { // show one frame large
    this.parts.forEach(({ figure }, i) => { figure.hidden = i !== chosen; });
    this.thumbs.forEach((thumb, i) => thumb.setAttribute("aria-pressed", String(i === chosen)));
    const film = this.thumbs[chosen].parentNode, thumb = this.thumbs[chosen].getBoundingClientRect();
    if (film) film.scrollLeft += thumb.left + thumb.width / 2 - film.getBoundingClientRect().left - film.clientWidth / 2;
    if (this.watch) { this.fit(); this.draw(); }
  }

  when(token) { // "1.48 s", or "1.00–1.50 s" for several frames; null for a still image
    const place = this.locate(token);
    if (!place || this.images[place.grid.image].time === undefined) return null;
    const first = this.images[place.grid.image].time, last = this.images[place.grid.image + place.grid.frames - 1].time;
    return first === last ? seconds(first) : `${first.toFixed(2)}–${seconds(last)}`;
  }

  shows(grid, image) { return image >= grid.image && image < grid.image + (grid.frames || 1); }

  bare() { // show or hide everything drawn over the image
    this.imageButton.setAttribute("aria-pressed", String(this.frames.classList.toggle("bare")));
  }

  fit() { // use the largest size that fits the column and the window
    const narrow = window.innerWidth <= 760;
    const high = narrow ? 0.2 * window.innerHeight : Math.max(220, window.innerHeight - 420) / Math.min(2, this.clip ? 1 : this.images.length);
    this.images.forEach((image, i) => {
      const wide = this.frames.clientWidth || 400;
      this.parts[i].stage.style.width = `${Math.round(Math.min(wide, (high * image.w) / image.h))}px`;
    });
  }

  locate(index) { // {grid, row, column} of a vision token, or null
    for (const grid of this.grids) {
      const offset = index - grid.first, across = grid.columns + grid.gap;
      if (offset < 0 || offset >= grid.rows * across) continue;
      const row = Math.floor(offset / across), column = offset % across;
      return column < grid.columns ? { grid, row, column } : null;
    }
    return null;
  }

  at(image, event, view) { // the vision token under the pointer
    const shown = this.parts[image].stage.getBoundingClientRect(), { w, h } = this.images[image];
    const x = ((event.clientX - shown.left) / shown.width) * w, y = ((event.clientY - shown.top) / shown.height) * h;
    for (const grid of this.grids) {
      if (!this.shows(grid, image) || (view && grid.view !== view)) continue;
      const column = grid.xs.findIndex(([a, b]) => x >= a && x < b), row = grid.ys.findIndex(([a, b]) => y >= a && y < b);
      if (column >= 0 && row >= 0) return grid.first + row * (grid.columns + grid.gap) + column;
    }
    return null;
  }

  spot(token) { // "row 3, column 4", with the image and view where there are several
    const place = this.locate(token);
    if (!place) return null;
    const time = this.when(token);
    const many = time ? `${time}, ` : this.images.length > 1 ? `image ${place.grid.image + 1}, ` : "", part = place.grid.view !== "image" ? `${place.grid.view}, ` : "";
    return `${many}${part}row ${place.row + 1}, column ${place.column + 1}`;
  }

  box(image, x0, y0, x1, y1) {
    const { w, h } = this.images[image];
    const clip = (v, top) => Math.max(0, Math.min(top, v));
    return [clip(x0, w) / w, clip(y0, h) / h, clip(x1, w) / w, clip(y1, h) / h];
  }

  point(index) { // highlight one vision token; returns its place
    this.parts.forEach(({ spot }) => { spot.hidden = true; });
    const place = index === null || index === undefined ? null : this.locate(index);
    if (!place) return null;
    const { grid } = place;
    this.parts.forEach(({ spot }, image) => {
      if (!this.shows(grid, image)) return;
      this.lay(spot, place);
      spot.dataset.token = index;
      spot.hidden = false;
    });
    if (this.clip) this.choose(grid.image);
    return place;
  }

  lay(node, { grid, row, column }) { // put an element over one patch
    const [a, b, c, d] = this.box(grid.image, grid.xs[column][0], grid.ys[row][0], grid.xs[column][1], grid.ys[row][1]);
    Object.assign(node.style, { left: `${100 * a}%`, top: `${100 * b}%`, width: `${100 * (c - a)}%`, height: `${100 * (d - b)}%` });
  }

  outline(tokens, selected = 0) { // frames numbered from 2, after the highlighted patch; frames of selected patches are thicker
    this.near = tokens; this.selected = selected;
    this.parts.forEach(({ marks }) => marks.replaceChildren());
    tokens.forEach((token, k) => this.frame(token, k < selected ? "near chosen" : "near", String(k + 2)));
    if (this.ringed !== undefined && this.ringed !== null) this.frame(this.ringed, "ring", "");
  }

  ring(token) { // a dashed frame around the patch that was clicked
    this.ringed = token;
    this.outline(this.near || [], this.selected);
  }

  frame(token, kind, text) {
    const place = this.locate(token);
    if (!place) return;
    const mark = make("div", { class: kind }, text);
    this.lay(mark, place);
    this.parts[place.grid.image].marks.append(mark);
  }

  paint(values, view) { // values: token -> 0..1, or null
    this.values = values; this.view = view; this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.frames.classList.toggle("heated", Boolean(this.heat && this.values));
    this.parts.forEach(({ stage, canvas }, image) => {
      const w = Math.round(stage.clientWidth * ratio), h = Math.round(stage.clientHeight * ratio);
      if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
      const pen = canvas.getContext("2d");
      pen.clearRect(0, 0, w, h);
      for (const grid of this.grids) {
        if (!this.shows(grid, image) || (this.view && grid.view !== this.view)) continue;
        for (let r = 0; r < grid.rows; r++) for (let c = 0; c < grid.columns; c++) {
          const [x0, y0, x1, y1] = this.box(image, grid.xs[c][0], grid.ys[r][0], grid.xs[c][1], grid.ys[r][1]);
          if (x1 <= x0 || y1 <= y0) continue;
          const left = Math.round(x0 * w), top = Math.round(y0 * h);
          const rect = [left, top, Math.round(x1 * w) - left, Math.round(y1 * h) - top];
          if (this.heat && this.values) {
            const value = this.values(grid.first + r * (grid.columns + grid.gap) + c);
            if (value !== null) { pen.fillStyle = heatColor(value); pen.fillRect(...rect); }
          }
          if (this.lines) {
            pen.strokeStyle = "rgba(255,255,255,.55)"; pen.lineWidth = Math.max(1, ratio / 2);
            pen.strokeRect(rect[0] + .5, rect[1] + .5, rect[2], rect[3]);
          }
        }
      }
    });
  }
}

// The legend of the marks; the style sheet hides marks that no answer has.
const LEGEND = [["changed", "changed by the method"], ["unsupported", "not supported by the image"]];
const ACCOUNT = "At every step ReVisiT keeps the plausible next tokens, checks which of those words each image patch supports, selects the patch (or the few patches) that agrees most with the model, and multiplies the two distributions: words that the image does not support become less likely.";
const KEYS = [["← →", "previous, next step"], ["↑ ↓", "other answer"], ["n p", "next, previous change"], ["Home End", "first, last step"],
  ["h", "heat map"], ["g", "patch grid"], ["o", "image alone"], ["?", "this help"]];
const TERMS = [["plausible tokens", "tokens at least alpha times as likely as the likeliest one; only they can be chosen"],
  ["model, %", "the model's own probability, among the plausible tokens"], ["vision token, %", "the selected patch's distribution over the plausible tokens: its hidden state through the model's own head; the mean where several patches are selected"],
  ["after, %", "the distribution that the next token is chosen from: model × vision token to the power of the weight, normalized"],
  ["divergence", "how far a patch is from the model's distribution; the smallest is selected"],
  ["weight", "how much the vision token counts at this step: 1 is the plain product, as in the paper, and 0 leaves the model unchanged"],
  ["heat map", "the brighter a patch, the more it agrees with the model at this step; the scale is the same at all steps with the default divergence"],
  ["frames", "the patches that agree most with the model, numbered from the best; a thick frame is selected by the method"],
  ["shading", "the share of probability that the method moved at a step"]];

class Viewer {
  constructor(root, data) {
    this.data = data; this.now = null; this.pinned = null; this.cards = []; this.patch = null;
    const look = (this.look = make("section", { class: `look${data.images.length === 1 ? " single" : ""}`, "aria-label": data.images.some(({ time }) => time !== undefined) ? "Video" : "Image" }));
    this.answersBox = make("div", { class: "answers" });
    this.why = make("section", { class: "why", "aria-label": "Candidates at this step", tabindex: "0" });
    this.table = make("div", { class: "sheet" }); // on a phone, folded under the heading
    this.unfold = make("button", { type: "button", class: "quiet unfold", "aria-expanded": "false", onclick: () => this.fold(!this.why.classList.toggle("open")) }, "Candidates ▴");
    this.stepTitle = make("h2");
    this.why.append(make("div", { class: "handle" }, this.stepTitle, this.unfold), this.table);
    this.status = make("p", { class: "sr", role: "status", "aria-live": "polite" });
    this.help = this.makeHelp();
    root.append(this.guide(), make("div", { class: "viewer" }, look, make("div", { class: "read" }, this.answersBox, this.status), this.why), this.help);
    this.stage = new Stage(look, data.images, data.grids);
    this.stage.parts.forEach(({ stage }, image) => stage.addEventListener("click", (event) => this.pick(image, event)));
    this.heatButton = make("button", { class: "quiet", type: "button", "aria-pressed": "true", title: "Which patches agree with the model at this step (h)", onclick: () => this.toggle("heat") }, "Heat map");
    this.gridButton = make("button", { class: "quiet", type: "button", "aria-pressed": "false", title: "The borders of the patches (g)", onclick: () => this.toggle("lines") }, "Patches");
    const views = [...new Set(data.grids.map((grid) => grid.view))];
    this.viewSelect = make("select", { class: "quiet", "aria-label": "Which tokens the heat map shows", onchange: () => this.show() },
      make("option", { value: "" }, "view of the selected patch"), ...views.map((view) => make("option", { value: view }, view === "tile" ? "tiles" : view)));
    this.viewSelect.hidden = views.length < 2;
    this.where = make("p", { class: "where" });
    this.patchCard = make("div", { class: "patch", hidden: true });
    look.append(make("div", { class: "tools" }, this.heatButton, this.gridButton, this.stage.imageButton, this.viewSelect,
      make("span", { class: "legend" }, "disagrees", make("i"), "agrees")), this.where, this.patchCard);
    if (data.reason) look.append(make("p", { class: "note" }, `Patches are not available: ${data.reason}`));
    data.answers.forEach((answer, i) => this.addCard(i));
    this.life = new AbortController();
    this.follow = true; // until the reader selects a word
    document.addEventListener("keydown", (event) => this.key(event), { signal: this.life.signal });
    window.addEventListener("hashchange", () => this.goToHash(), { signal: this.life.signal });
    this.first();
  }

  dispose() { this.life.abort(); this.stage.watch.disconnect(); }

  guide() { // one line: the objects in the image, and the legend
    const { objects } = this.data;
    return make("div", { class: "guide" },
      objects ? make("p", { class: "shown" }, "In the image: ", make("b", {}, objects.join(", ") || "no known object"), ".") : null,
      make("ul", { class: "marks" }, ...LEGEND.map(([kind, text]) => make("li", { class: kind }, make("span", { class: `mark ${kind}` }, "word"), ` ${text}`))),
      make("button", { type: "button", class: "quiet", title: "Help (?)", onclick: () => this.help.showModal() }, make("span", { class: "wide" }, "How to read this "), "(?)"));
  }

  makeHelp() {
    const close = make("button", { type: "button", class: "quiet", onclick: () => this.help.close() }, "Close ×");
    const list = (pairs, tag) => make("dl", {}, ...pairs.flatMap(([name, text]) => [make("dt", {}, make(tag, {}, name)), make("dd", {}, text)]));
    return make("dialog", { class: "help", "aria-label": "Help" }, make("div", { class: "bar-of-help" }, make("h2", {}, "How to read this page"), close), make("p", {}, ACCOUNT),
      make("p", {}, "Point at a word to see its step, click to stay there. Click a patch of the image to see what it predicts and at which steps it was selected. The address contains the step, so you can link to it."),
      list(TERMS, "b"), make("h2", {}, "Keys"), list(KEYS, "kbd"));
  }

  first() { // select the step in the address, or else the largest change by the first method that changed a token
    if (this.goToHash()) return;
    const changed = this.data.answers.findIndex(({ steps }) => steps.some(({ was }) => was !== undefined));
    let best = null, most = -1;
    this.data.answers.forEach((answer, a) => answer.steps.forEach((step, s) => {
      if (changed >= 0 && a !== changed) return;
      const weight = (step.was !== undefined ? 1 : 0) + (step.v || 0) + (step.i !== undefined ? 1e-6 : 0);
      if (weight > most) { most = weight; best = [a, s]; }
    }));
    if (best) this.select(...best, true, false); else this.show();
  }

  goToHash() { // #step=14, or #answer=2&step=14
    const named = new URLSearchParams(window.location.hash.slice(1)), step = Number(named.get("step")), answer = Number(named.get("answer") || 1);
    const there = this.data.answers[answer - 1];
    if (!Number.isInteger(step) || !there || !there.steps[step - 1]) return false;
    if (!this.now || this.now[0] !== answer - 1 || this.now[1] !== step - 1) this.select(answer - 1, step - 1, true, false);
    return true;
  }

  remember(i, s) { // put the step into the address; on the interactive page, only after the reader has selected one
    if (this.follow && !this.data.prompt) return;
    const address = `#${i ? `answer=${i + 1}&` : ""}step=${s + 1}`;
    if (window.location.hash !== address) try { window.history.replaceState(null, "", address); } catch (error) { /* not allowed in a frame */ }
  }

  addAnswer(answer) { this.data.answers.push(answer); this.addCard(this.data.answers.length - 1); }

  addCard(i) {
    const answer = this.data.answers[i];
    answer.bytes = answer.maps ? bytes(answer.maps) : new Uint8Array(0);
    const facts = make("span", { class: "facts" });
    const tokens = make("div", { class: "tokens", role: "group", "aria-label": `Answer of ${[answer.name, answer.settings].filter(Boolean).join(", ")}; arrow keys walk its tokens` });
    const bars = make("div", { class: "bars", "aria-hidden": "true" }), strip = make("div", { class: "strip" }, bars, make("p", {}, "Shading and bars: share of probability moved"));
    const changes = make("ol", { class: "changes", "aria-label": "Where the best token changed" });
    const card = make("article", { class: "answer" }, make("header", {}, make("h2", {}, answer.name), answer.settings ? make("span", { class: "settings", title: `Settings that are not the method's defaults: ${answer.settings}` }, plainly(answer.settings)) : null, facts), ...answer.notes.map((note) => make("p", { class: "note" }, note)), tokens, strip, changes);
    this.answersBox.append(card);
    this.cards[i] = { card, facts, tokens, strip, changes, buttons: [], bars: [] };
    bars.addEventListener("click", (event) => {
      const at = this.cards[i].bars.indexOf(event.target);
      if (at >= 0) this.select(i, at, true);
    });
    answer.steps.forEach((_, s) => this.addToken(i, s));
    this.count(i);
    if (answer.check) this.checked(i, answer.check);
  }

  addToken(i, s) {
    const step = this.data.answers[i].steps[s], card = this.cards[i];
    const changed = step.was !== undefined;
    const special = SPECIAL.test(step.t);
    const told = [`step ${s + 1}`, changed ? `instead of “${step.was.trim()}”` : "", step.v > 0.0005 ? `${percent(step.v)} % of probability moved` : "",
      step.w ? "not in the image" : "", step.h ? "part of a thought" : ""].filter(Boolean).join(", ");
    const button = make("button", {
      type: "button", class: `tok${changed ? " changed" : ""}${step.w ? " unsupported" : ""}${step.h ? " thought" : ""}${special ? " special" : ""}`,
      "aria-pressed": "false", tabindex: "-1", title: told, "aria-label": `${step.t.trim() || "blank"}, ${told}`,
      onclick: () => { this.follow = false; this.select(i, s, true); }, onmouseenter: () => this.select(i, s, false),
      onmouseleave: () => { if (this.pinned) this.select(...this.pinned, false); },
      onfocus: () => this.select(i, s, true, false),
    }, step.t.trim() || (step.t.includes("\n") ? "⏎" : step.t ? "␣" : "·"));
    button.style.setProperty("--shift", (step.v || 0).toFixed(3));
    const time = this.stage.clip && step.i !== undefined ? this.stage.when(step.i) : null;
    if (time) button.dataset.when = time;
    // Spaces are between the buttons, so that lines break as in plain text.
    const lead = /^\s*/.exec(step.t)[0], breaks = (step.t.match(/\n/g) || []).length;
    card.tokens.append(lead && step.t.trim() ? lead.replace(/\n/g, "") || " " : "", button, ...Array.from({ length: breaks }, () => make("br")));
    card.buttons.push(button);
    const bar = make("i", { class: changed ? "changed" : "", title: `step ${s + 1}: ${step.t.trim()}` });
    bar.style.setProperty("--shift", (step.v || 0).toFixed(3));
    card.strip.firstChild.append(bar);
    card.bars.push(bar);
    if (changed) card.changes.append(make("li", {}, make("button", { type: "button", onclick: () => this.select(i, s, true) },
      make("span", { class: "n" }, String(s + 1)), " ", visible(step.t.trim()), " ", make("s", {}, visible(step.was.trim())))));
    return button;
  }

  count(i) {
    const { steps } = this.data.answers[i], card = this.cards[i];
    const changed = steps.filter((step) => step.was !== undefined).length;
    const detailed = steps.some((step) => step.c && step.c.some((entry) => entry[2] !== null));
    card.facts.textContent = `${steps.length} token${steps.length === 1 ? "" : "s"}` + (detailed ? `, ${changed} changed` : "");
    card.strip.hidden = !steps.some((step) => step.v > 0.0005);
    card.changes.hidden = !changed;
  }

  checked(i, check) { // mark the words that the image does not support
    const answer = this.data.answers[i], text = answer.steps.map(answered).join("");
    answer.check = check;
    let at = text.trimStart().length - text.length; // position in the checked text, which has no leading spaces
    answer.steps.forEach(({ t }, s) => {
      const word = check.words.find(({ flagged, start, end }) => flagged && start < at + t.length && end > at);
      if (word) this.note(i, s, "unsupported", `support by the image ${word.support.toFixed(2)}`);
      at += t.length;
    });
    const words = check.words.filter(({ checkable }) => checkable).map(({ text, support }) => `${text} ${support.toFixed(2)}`);
    this.cards[i].card.append(make("p", { class: "checked" }, words.length ? `Support by the image (flagged below ${check.threshold.toFixed(2)}): ${words.join(", ")}. ` : "", check.notes.join(" ")));
  }

  note(i, s, kind, text) { // mark a word and add to its tooltip
    const button = this.cards[i].buttons[s];
    if (button.classList.contains(kind)) return;
    button.classList.add(kind);
    button.title += `, ${text}`;
    button.setAttribute("aria-label", `${button.getAttribute("aria-label")}, ${text}`);
  }

  toggle(what) {
    this.stage[what] = !this.stage[what];
    (what === "heat" ? this.heatButton : this.gridButton).setAttribute("aria-pressed", String(this.stage[what]));
    this.stage.draw();
  }

  step() { return this.now ? this.data.answers[this.now[0]].steps[this.now[1]] : null; }

  select(i, s, pin, focus = pin) {
    const steps = this.data.answers[i].steps;
    if (!steps.length) return;
    s = Math.max(0, Math.min(steps.length - 1, s));
    if (this.now) this.mark(...this.now, false);
    this.now = [i, s];
    if (pin) { this.pinned = [i, s]; this.remember(i, s); }
    this.mark(i, s, true);
    if (focus && document.activeElement !== this.cards[i].buttons[s]) this.cards[i].buttons[s].focus({ preventScroll: false });
    this.show();
    if (pin && !(this.follow && !this.data.prompt)) this.reveal();
  }

  fold(folded) {
    this.unfold.textContent = folded ? "Candidates ▴" : "Close ×";
    this.unfold.setAttribute("aria-expanded", String(!folded));
    this.reveal();
  }

  reveal() { // on a phone: scroll the word into view between the image above and the candidates below
    if (window.innerWidth > 760 || !this.now) return;
    const word = this.cards[this.now[0]].buttons[this.now[1]].getBoundingClientRect();
    const top = this.look.getBoundingClientRect().bottom + 8, bottom = (this.why.hidden ? window.innerHeight : this.why.getBoundingClientRect().top) - 8;
    if (word.bottom > bottom) window.scrollBy(0, word.bottom - bottom);
    else if (word.top < top) window.scrollBy(0, word.top - top);
  }

  mark(i, s, on) {
    const card = this.cards[i], button = card.buttons[s];
    button.setAttribute("aria-pressed", String(on));
    button.tabIndex = on ? 0 : -1;
    card.bars[s].classList.toggle("now", on);
    card.card.classList.toggle("current", on);
  }

  show() {
    const step = this.step();
    this.why.hidden = !step || !step.c;
    if (!step) { this.where.textContent = ""; return; }
    const [i, s] = this.now, answer = this.data.answers[i];
    const place = this.stage.point(step.i);
    const view = this.viewSelect.value || (place || { grid: this.data.grids[0] || { view: null } }).grid.view;
    if (step.m !== undefined && answer.n) {
      const start = step.m * answer.n, map = answer.bytes;
      this.stage.paint((token) => 1 - map[start + token] / 255, view);
    } else this.stage.paint(null, view);
    const neighbors = answer.method.neighbors || 1; // how many vision tokens the method selects
    this.tell(step, place, neighbors);
    this.stage.outline((step.p || []).map(([token]) => token).filter((token) => token !== step.i), neighbors - 1);
    if (step.c) this.candidates(answer, step, s);
  }

  tell(step, place, neighbors) {
    this.where.replaceChildren();
    if (step.i === undefined) {
      const plain = step.c && step.c.every((entry) => entry[2] === null);
      this.where.append(step.c && step.k === 1 ? "Only one token was plausible at this step." : plain ? "Plain decoding uses no patch." : "No patch was selected at this step.");
    } else {
      const spot = place ? this.stage.spot(step.i) : null, also = Math.min(neighbors, step.p ? step.p.length : 1) - 1;
      this.where.append("For ", make("b", {}, visible(step.t.trim())), ` ${spot ? `the patch at ${spot} was selected` : `vision token ${step.i}, which has no place on the image, was selected`}${also ? ` with the ${also} next best` : ""}; layer ${step.l}, divergence ${number(step.d)}${step.g === undefined || step.g === 1 ? "" : `, weight ${number(step.g)}`}.`);
    }
    this.status.textContent = `${step.t.trim()}. ${this.where.textContent}`;
  }

  pick(image, event) { // a patch was clicked
    const token = this.stage.at(image, event, this.viewSelect.value || this.stage.view || null);
    if (token !== null) this.showPatch(token === this.patch ? null : token);
  }

  showPatch(token) { // show the predictions of a patch, and the steps at which it was selected
    this.patch = token;
    this.stage.ring(token);
    this.patchCard.hidden = token === null;
    if (token === null) return;
    const predicted = this.data.predictions && this.data.predictions[token];
    const steps = this.data.answers.flatMap((answer, i) => answer.steps.flatMap((step, s) => (step.i === token ? [[i, s, step.t.trim()]] : [])));
    this.patchCard.replaceChildren(
      make("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => this.showPatch(null) }, "×"),
      make("b", {}, this.stage.spot(token) ? `The patch at ${this.stage.spot(token)}` : `Vision token ${token}`), ...(predicted ? [" predicts ", ...predicted.flatMap(([text, p], k) => [k ? ", " : "", make("span", { class: "predicted" }, visible(text.trim() || text)), ` ${percent(p)} %`]), " (last layer, whole vocabulary). "] : [" "]),
      steps.length ? `Selected at ${steps.length} step${steps.length === 1 ? "" : "s"}: ` : "It was never selected.",
      ...steps.slice(0, 40).map(([i, s, text]) => make("button", { type: "button", class: "quiet", onclick: () => this.select(i, s, true) }, `${s + 1} ${visible(text)}`)));
  }

  candidates(answer, step, s) {
    const alone = step.c.reduce((best, entry, at) => (entry[1] > step.c[best][1] ? at : best), 0);
    const plain = step.c.every((entry) => entry[2] === null); // only the model: one column
    const columns = plain ? [["base", "model, %", 1]] : [["base", "model, %", 1], ["vision", step.i !== undefined ? "vision token, %" : "contrast, %", 2], ["final", "after, %", 3]];
    const row = (entry, at) => {
      const kind = [at === step.o ? "chosen" : "", at === alone && step.was !== undefined ? "alone" : ""].join(" ").trim();
      const title = [at === step.o ? "chosen" : "", at === alone ? "the model's own best" : ""].filter(Boolean).join(", ");
      return make("tr", { class: kind || null, title: title || null }, make("td", { title: JSON.stringify(entry[0]) }, visible(entry[0])), ...columns.map(([name, , at]) => {
        const bar = make("div", { class: `bar ${name}${entry[at] === null ? " none" : ""}` }, percent(entry[at]));
        bar.style.setProperty("--p", entry[at] || 0);
        return make("td", {}, bar);
      }));
    };
    const [likely, rare] = [[], []];
    const order = step.c.map((_, at) => at).filter((at) => at !== alone);
    order.splice(alone === 0 ? 0 : 1, 0, alone); // the model's own choice is never further down than the second place
    for (const at of order) (at === step.o || at === alone || Math.max(...step.c[at].slice(1)) >= 0.01 ? likely : rare).push(row(step.c[at], at));
    const meaning = Object.fromEntries(TERMS);
    this.stepTitle.replaceChildren(`Step ${s + 1}: “${visible(step.t.trim())}”`, ...(step.was !== undefined ? [` instead of “${visible(step.was.trim())}”`] : []));
    this.table.replaceChildren(
      make("p", { class: "sub" }, `${answer.name} · `, make("span", { title: meaning["plausible tokens"] }, `${step.k} plausible token${step.k === 1 ? "" : "s"}`), step.c.length < step.k ? `, the best ${step.c.length} shown` : ""),
      make("table", { class: "cands" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "token"),
        ...columns.map(([kind, name]) => make("th", { scope: "col", class: kind, title: meaning[name] || "the distribution of the method's second branch" }, name)))), make("tbody", {}, ...likely)),
      rare.length ? make("details", { class: "rare" }, make("summary", {}, `${rare.length} more under 1 %`), make("table", { class: "cands" }, make("tbody", {}, ...rare))) : "",
      ...this.reason(step, alone), ...this.formula(answer, step));
    this.table.scrollTop = this.why.scrollTop = 0;
  }

  reason(step, alone) { // explain why the best token is not the first choice of the model or of the patch
    if (step.i === undefined || step.c.some((entry) => entry[2] === null)) return [];
    const best = (column) => step.c.reduce((a, entry, b) => (entry[column] > step.c[a][column] ? b : a), 0);
    const name = (at) => `“${visible(step.c[at][0].trim())}”`, share = (at, column) => `${percent(step.c[at][column])} %`;
    const winner = best(3), patch = best(2), parts = [];
    if (alone !== winner) parts.push(`The model prefers ${name(alone)} (${share(alone, 1)}). The vision token gives it ${share(alone, 2)} and ${name(winner)} ${share(winner, 2)}, so ${name(winner)} wins.`);
    if (patch !== winner && patch !== alone) parts.push(`The vision token prefers ${name(patch)} (${share(patch, 2)}). The model gives ${name(patch)} ${share(patch, 1)}, so it cannot win.`);
    return parts.map((text) => make("p", { class: "reason" }, text));
  }

  formula(answer, step) { // show how the last column is computed from the other two
    if (step.i === undefined || step.c.every((entry) => entry[2] === null)) return [];
    const many = Math.min(answer.method.neighbors || 1, step.p ? step.p.length : 1), weight = step.g === undefined ? 1 : step.g;
    return [make("p", { class: "formula" }, "after ∝ model × vision token", weight === 1 ? null : make("sup", {}, number(weight)),
      many > 1 ? `; vision token: the mean of ${many} patches` : answer.method.select === "soft" ? "; vision token: the patches mixed by agreement" : "")];
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest && event.target.closest("input, select, textarea, [contenteditable]")) return;
    if (event.key === "?") return this.help.open ? this.help.close() : this.help.showModal();
    if (!this.now || this.help.open) return;
    const [i, s] = this.now, answers = this.data.answers;
    const go = (a, b) => { event.preventDefault(); this.follow = false; this.select(a, b, true); };
    const change = (way) => {
      for (let at = s + way; at >= 0 && at < answers[i].steps.length; at += way) if (answers[i].steps[at].was !== undefined) return go(i, at);
    };
    switch (event.key) {
      case "ArrowLeft": return go(i, s - 1);
      case "ArrowRight": return go(i, s + 1);
      case "ArrowUp": if (i > 0 && answers[i - 1].steps.length) go(i - 1, s); return;
      case "ArrowDown": if (i + 1 < answers.length && answers[i + 1].steps.length) go(i + 1, s); return;
      case "Home": return go(i, 0);
      case "End": return go(i, answers[i].steps.length - 1);
      case "n": return change(1);
      case "p": return change(-1);
      case "h": return this.toggle("heat");
      case "g": return this.toggle("lines");
      case "o": return this.stage.bare();
    }
  }
}
