// The interactive page: choose an image and methods, ask, and show the answers in the viewer.
// Answers are streamed chat completions; `decoding.page` in the last chunk is the data of the viewer.
async function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`'${file.name}' cannot be read.`));
    reader.readAsDataURL(file);
  });
}

class Studio {
  constructor(root, setup) {
    this.setup = setup; this.image = null; this.viewer = null; this.running = null; this.settings = {};
    this.key = this.takeKey();
    this.file = make("input", { type: "file", accept: "image/*", id: "file", onchange: () => this.file.files[0] && this.upload(this.file.files[0]) });
    this.drop = make("label", { class: "drop", for: "file" }, make("span", {}, "Drop an image"), this.file);
    this.prompt = make("textarea", { id: "prompt", rows: 2, "aria-label": "Question" });
    this.prompt.value = setup.prompt;
    this.length = make("input", { type: "number", id: "length", min: 1, max: setup.longest, value: Math.min(128, setup.longest) });
    this.add = make("select", { "aria-label": "Add a method", onchange: () => { this.choose(this.add.value); this.add.value = ""; } },
      make("option", { value: "" }, "Add a method…"), ...setup.methods.map((m) => make("option", { value: m.name }, `${m.name}: ${m.summary}`)));
    this.go = make("button", { type: "button", class: "go", id: "go", disabled: true, onclick: () => this.start() }, "Ask");
    this.stop = make("button", { type: "button", class: "quiet", id: "stop", hidden: true, onclick: () => this.halt("Stopped.") }, "Stop");
    this.save = make("button", { type: "button", class: "quiet", id: "save", hidden: true, onclick: () => this.download() }, "Download the page");
    this.sample = make("button", { type: "button", class: "quiet", id: "sample", onclick: () => this.upload(null) }, "Sample image");
    this.samples = 0; // number of samples loaded
    this.uploads = 0; // number of images chosen; only the last one is shown
    this.tell = make("p", { class: "tell", role: "status", "aria-live": "polite" }, "Choose an image to begin.");
    this.chosen = make("div", { class: "methods" });
    this.growing = make("p", { class: "growing", hidden: true, "aria-label": "The answer so far" });
    this.show = make("div", {});
    root.append(make("section", { class: "ask", "aria-label": "Ask" }, this.drop, this.prompt, make("div", { class: "buttons" }, this.go, this.stop),
      make("div", { class: "line" }, this.chosen, this.add, make("label", { for: "length" }, "at most", this.length, "tokens"), this.sample, this.save), this.tell), this.growing, this.show);
    for (const name of setup.start) this.choose(name);
    for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
      event.preventDefault();
      this.drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files[0]) this.upload(event.dataTransfer.files[0]);
    });
    document.addEventListener("paste", (event) => { const file = [...event.clipboardData.files][0]; if (file) this.upload(file); });
    this.prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start(); });
    this.upload(null).then((shown) => shown && this.start()); // begin with the answers about a sample
  }

  takeKey() { // move the key from the address (#key=…) to the storage of the tab
    const key = new URLSearchParams(window.location.hash.slice(1)).get("key");
    if (key) {
      window.sessionStorage.setItem("key", key);
      window.history.replaceState(null, "", window.location.pathname);
    }
    return key || window.sessionStorage.getItem("key") || "";
  }

  async ask(path, options = {}) { // return the server's response, or throw its error message
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) } });
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || `The server answered ${response.status}.`);
  }

  say(text, bad = false) { this.tell.textContent = text; this.tell.classList.toggle("bad", bad); }

  async upload(file) { // show an image, or a sample; return whether it is still the last one chosen
    const number = ++this.uploads;
    this.say(file ? `Reading ${file.name || "the image"}…` : "Loading a sample…");
    try {
      if (file && file.size * 4 / 3 > this.setup.bytes) throw new Error(`The file has ${(file.size / 1e6).toFixed(0)} MB; at most ${(this.setup.bytes * 0.75 / 1e6).toFixed(0)} MB are allowed.`);
      const image = file ? { src: await dataUri(file), objects: null } : await (await this.ask(`sample/${this.samples}`)).json();
      const shown = make("img", { src: image.src, alt: "Your image; choose, drop or paste another" });
      try { await shown.decode(); } catch (error) { throw new Error(`'${file ? file.name : "sample"}' is not an image that this browser can show.`); }
      if (number !== this.uploads) return false;
      this.image = image;
      if (!file) { this.samples += 1; this.sample.textContent = "Another sample"; }
      this.drop.replaceChildren(shown, make("span", {}, `${shown.naturalWidth} × ${shown.naturalHeight}`), this.file);
      this.go.disabled = false;
      this.say("Ready.");
    } catch (error) {
      if (number !== this.uploads) return false;
      this.say(error.message, true);
    }
    this.file.value = "";
    return Boolean(this.image);
  }

  choose(name) {
    const method = this.setup.methods.find((m) => m.name === name);
    if (!method || this.settings[name]) return;
    if (Object.keys(this.settings).length >= 4) return this.say("At most four methods can be compared; remove one first.", true);
    this.settings[name] = {};
    const alpha = method.settings.find((f) => f.name === "alpha" && Number(f.default) > 0 && Number(f.default) <= 0.1); // a slider over powers of ten
    const fields = method.settings.filter((f) => f !== alpha).map((f) => {
      const set = (value) => { this.settings[name][f.name] = String(value); this.again(); };
      let input;
      if (f.choices.length) input = make("select", { onchange: (e) => set(e.target.value) }, ...f.choices.map((c) => make("option", { value: c, selected: c === f.default }, c)));
      else input = make("input", { type: "text", value: f.default, onchange: (e) => set(e.target.value) });
      return make("label", {}, f.name, input);
    });
    let slider = null;
    if (alpha) {
      const shown = make("output", {}, Number(alpha.default).toExponential(0));
      const range = make("input", { type: "range", min: -6, max: 0, step: 0.25, value: Math.log10(Number(alpha.default)), "aria-label": `alpha of ${name}`, id: `alpha-${name}`,
        oninput: () => { const value = 10 ** Number(range.value); shown.textContent = value.toExponential(1); this.settings[name].alpha = String(value); this.again(); } });
      slider = make("div", { class: "alpha" }, "alpha", range, shown);
    }
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}`, onclick: () => { delete this.settings[name]; card.remove(); } }, "Remove");
    const card = make("details", { class: "method", "data-method": name }, make("summary", {}, name),
      make("div", { class: "panel" }, make("p", { class: "about" }, method.summary), slider, make("div", { class: "fields" }, ...fields), remove));
    this.chosen.append(card);
  }

  again() { // ask again, shortly after the last change of a setting
    if (!this.image || !(this.viewer || this.running)) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), 300);
  }

  halt(text) {
    if (this.running) this.running.abort();
    this.running = null;
    this.stop.hidden = this.growing.hidden = true; this.go.disabled = !this.image;
    if (text) this.say(text);
  }

  async start() {
    if (!this.image) return this.say("Choose an image first.", true);
    if (!this.prompt.value.trim()) { this.prompt.focus(); return this.say("The question is empty.", true); }
    const asked = (this.asked = { image: this.image, prompt: this.prompt.value, length: Number(this.length.value) }); // what all methods answer, whatever changes meanwhile
    const methods = Object.entries(this.settings).map(([method, settings]) => ({ method, settings: { ...settings } }));
    if (!methods.length) return this.say("Choose at least one method.", true);
    this.halt();
    const control = (this.running = new AbortController());
    this.stop.hidden = false; this.save.hidden = true;
    try {
      for (const [number, decoding] of methods.entries()) { // one after the other
        this.say(`Answering with ${decoding.method}…`);
        this.growing.textContent = ""; this.growing.hidden = false;
        await this.answer(number, asked, { ...decoding, record: true, objects: asked.image.objects }, control);
        if (this.running !== control) return;
      }
      this.halt("Done. Click a word to see where it came from.");
      document.querySelector("h1").textContent = this.finding();
      if (this.viewer.follow) this.viewer.first(); // open at the biggest change, unless the reader has chosen a step
      this.save.hidden = false;
    } catch (error) {
      if (control.signal.aborted) return;
      this.halt();
      this.say(error.message, true);
    }
  }

  async answer(number, asked, decoding, control) { // one chat completion, streamed
    const content = [{ type: "image_url", image_url: { url: asked.image.src } }, { type: "text", text: asked.prompt }];
    const body = { model: this.setup.model, messages: [{ role: "user", content }], max_tokens: asked.length, stream: true, stream_options: { include_usage: true }, check: true, decoding };
    const response = await this.ask("v1/chat/completions", { method: "POST", signal: control.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (this.running !== control || event === "data: [DONE]") return;
        this.take(number, JSON.parse(event.slice("data: ".length)));
      }
    }
  }

  finding() { // the flagged words, with the methods that wrote them
    const methods = {};
    for (const { name, check } of this.viewer.data.answers) for (const word of check.flagged) methods[word] = [...new Set([...(methods[word] || []), name])];
    const found = Object.entries(methods).map(([word, names]) => `‘${word}’ (${names.join(", ")})`);
    return found.length ? `Not supported by the image: ${found.join(", ")}` : "The check flags no word";
  }

  take(number, { error, choices, decoding, check }) { // process a chunk
    if (error) throw new Error(error.message);
    if (choices.length) this.growing.textContent += choices[0].delta.reasoning_content || choices[0].delta.content || "";
    if (check) this.check = check;
    if (!decoding) return;
    const answer = { ...decoding.page.answers[0], check: this.check };
    if (number) return this.viewer.addAnswer(answer);
    if (this.viewer) this.viewer.dispose();
    this.show.replaceChildren();
    if (window.location.hash) window.history.replaceState(null, "", window.location.pathname); // the step of an earlier answer
    this.viewer = new Viewer(this.show, { ...decoding.page, answers: [answer] });
  }

  async download() { // save this page with the answers in place of the setup
    const answers = this.viewer.data.answers.map(({ bytes, ...answer }) => answer);
    const data = JSON.stringify({ ...this.viewer.data, answers, prompt: this.asked.prompt, model: this.setup.model });
    const text = await (await this.ask("")).text();
    const saved = text.replace(/(id="data">)[^<]*/, (all, tag) => tag + data.replace(/</g, "\\u003c"));
    const link = make("a", { href: URL.createObjectURL(new Blob([saved], { type: "text/html" })), download: "revisit.html" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }
}
