// The interactive page: choose, ask, watch the answers grow. The viewer does the showing.
class Studio {
  constructor(root, setup) {
    this.setup = setup; this.image = null; this.viewer = null; this.running = null; this.run = null; this.settings = {};
    this.file = make("input", { type: "file", accept: "image/*", id: "file", onchange: () => this.file.files[0] && this.upload(this.file.files[0]) });
    this.drop = make("label", { class: "drop", for: "file" }, make("span", {}, "Drop an image here, paste one, or click to choose"), this.file);
    this.prompt = make("textarea", { id: "prompt", rows: 2, "aria-label": "Question" });
    this.prompt.value = setup.prompt;
    this.model = make("select", { id: "model", "aria-label": "Model", onchange: () => this.recommend() }, ...setup.models.map((name) => make("option", { value: name }, name)));
    this.length = make("input", { type: "number", id: "length", min: 1, max: setup.longest, value: Math.min(128, setup.longest) });
    this.add = make("select", { "aria-label": "Add a method", onchange: () => { this.choose(this.add.value); this.add.value = ""; } },
      make("option", { value: "" }, "Add a method…"), ...this.methods().map((m) => make("option", { value: m.name }, `${m.name}: ${m.summary}`)));
    this.go = make("button", { type: "button", class: "go", id: "go", disabled: true, onclick: () => this.start() }, "Ask");
    this.stop = make("button", { type: "button", class: "quiet", id: "stop", hidden: true, onclick: () => this.halt("Stopped.") }, "Stop");
    this.save = make("a", { class: "quiet", id: "save", hidden: true, download: "revisit.html" }, "Download the page");
    this.sample = make("button", { type: "button", class: "quiet", id: "sample", hidden: !setup.samples, onclick: () => this.upload(null) }, "Sample image");
    this.samples = 0; // taken so far: the first is the picture of the demo
    this.tell = make("p", { class: "tell", role: "status", "aria-live": "polite" }, "Choose an image to begin.");
    this.chosen = make("div", { class: "methods" });
    this.show = make("div", {});
    root.append(make("div", { class: "ui" }, make("section", { class: "ask", "aria-label": "Ask" }, make("div", {}, this.drop, make("p", { class: "line", style: "margin-top:8px" }, this.sample)),
      make("div", { class: "form" }, this.prompt, make("div", { class: "line" }, make("label", {}, "Model", this.model), make("label", { for: "length" }, "At most", this.length, "tokens"), this.add),
        this.chosen, make("div", { class: "line" }, this.go, this.stop, this.save), this.tell)), this.show));
    for (const name of setup.start) this.choose(name);
    for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
      event.preventDefault();
      this.drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files[0]) this.upload(event.dataTransfer.files[0]);
    });
    document.addEventListener("paste", (event) => { const file = [...event.clipboardData.files][0]; if (file) this.upload(file); });
    this.prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start(); });
  }

  methods() { return this.setup.methods[this.model.value]; }

  recommend() { // another model: its own settings
    const names = Object.keys(this.settings);
    this.settings = {}; this.chosen.replaceChildren();
    for (const name of names) this.choose(name);
  }

  say(text, bad = false) { this.tell.textContent = text; this.tell.classList.toggle("bad", bad); }

  async reply(response) { // JSON, or an error with the server's sentence
    const body = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(body.error || `The server answered ${response.status}.`);
    return body;
  }

  async upload(file) {
    this.say(file ? `Reading ${file.name || "the image"}…` : "Drawing a sample…");
    try {
      if (file && file.size > this.setup.bytes) throw new Error(`The file has ${(file.size / 1e6).toFixed(0)} MB; at most ${(this.setup.bytes / 1e6).toFixed(0)} MB are taken.`);
      const name = file ? `?name=${encodeURIComponent(file.name || "image")}` : "";
      const response = file ? await fetch(`api/image${name}`, { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } }) : await fetch(`api/sample?number=${this.samples}`, { method: "POST" });
      this.image = await this.reply(response);
      if (!file) { this.samples += 1; this.sample.textContent = "Another sample"; }
      this.drop.replaceChildren(make("img", { src: this.image.src, alt: "Your image" }), make("span", {}, `${this.image.w} × ${this.image.h}; drop another to change it`), this.file);
      this.go.disabled = false;
      this.say("Ready.");
    } catch (error) { this.say(error.message, true); }
    this.file.value = "";
  }

  choose(name) {
    const method = this.methods().find((m) => m.name === name);
    if (!method || this.settings[name] || Object.keys(this.settings).length >= 4) return;
    this.settings[name] = {};
    const fields = method.settings.filter((f) => !(f.name === "alpha" && f.slider)).map((f) => {
      const set = (value) => { this.settings[name][f.name] = String(value); this.again(); };
      let input;
      if (f.kind === "choice") input = make("select", { onchange: (e) => set(e.target.value) }, ...f.choices.map((c) => make("option", { value: c, selected: c === f.default }, c)));
      else if (f.kind === "flag") input = make("select", { onchange: (e) => set(e.target.value) }, ...["true", "false"].map((c) => make("option", { value: c, selected: c === f.default }, c)));
      else input = make("input", { type: "text", value: f.default, onchange: (e) => set(e.target.value) });
      return make("label", {}, f.name, input);
    });
    const alpha = method.settings.find((f) => f.name === "alpha" && f.slider);
    let slider = null;
    if (alpha) {
      const shown = make("output", {}, Number(alpha.default).toExponential(0));
      const range = make("input", { type: "range", min: -6, max: 0, step: 0.25, value: Math.log10(Number(alpha.default)), "aria-label": `alpha of ${name}`, id: `alpha-${name}`,
        oninput: () => { const value = 10 ** Number(range.value); shown.textContent = value.toExponential(1); this.settings[name].alpha = String(value); this.again(); } });
      slider = make("div", { class: "alpha" }, "alpha", range, shown);
    }
    const card = make("div", { class: "method", "data-method": name }, make("div", { class: "line" }, make("b", {}, name),
      make("button", { type: "button", class: "quiet", style: "margin-left:auto", "aria-label": `Remove ${name}`, onclick: () => { delete this.settings[name]; card.remove(); } }, "×")),
      make("p", { class: "about" }, method.summary), slider, fields.length ? make("details", {}, make("summary", {}, "Settings"), make("div", { class: "fields" }, ...fields)) : null);
    this.chosen.append(card);
  }

  again() { // a setting changed: answer anew, once the hand is still
    if (!this.image || !this.viewer) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), 300);
  }

  halt(text) {
    if (this.running) this.running.abort();
    this.running = null;
    this.stop.hidden = true; this.go.disabled = !this.image;
    if (text) this.say(text);
  }

  async start() {
    if (!this.image) return this.say("Choose an image first.", true);
    if (!this.prompt.value.trim()) { this.prompt.focus(); return this.say("The question is empty; say what to ask.", true); }
    const methods = Object.entries(this.settings).map(([name, settings]) => ({ name, settings }));
    if (!methods.length) return this.say("Choose at least one method.", true);
    this.halt();
    const control = (this.running = new AbortController());
    this.stop.hidden = false; this.save.hidden = true;
    this.say("Asking…");
    try {
      const response = await fetch("api/run", { method: "POST", signal: control.signal, headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ image: this.image.id, prompt: this.prompt.value, model: this.model.value, methods, max_new_tokens: Number(this.length.value) }) });
      if (!response.ok) await this.reply(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) this.event(part, control);
      }
      if (this.running === control) throw new Error("The connection ended before the answer did.");
    } catch (error) {
      if (control.signal.aborted) return;
      this.halt();
      this.say(error.message, true);
    }
  }

  event(text, control) {
    if (this.running !== control) return;
    const kind = /^event: (.*)$/m.exec(text), line = /^data: (.*)$/m.exec(text);
    if (!kind || !line) return;
    const data = JSON.parse(line[1]);
    if (kind[1] === "wait") this.say(data.text);
    if (kind[1] === "scene") {
      if (this.viewer) this.viewer.dispose();
      this.show.replaceChildren();
      if (window.location.hash) window.history.replaceState(null, "", window.location.pathname); // the step of an earlier answer
      this.viewer = new Viewer(this.show, data);
      this.say("Answering…");
    }
    if (kind[1] === "step") this.viewer.addStep(data.answer, data.step, data.map);
    if (kind[1] === "finished") this.viewer.finish(data.answer, data.text);
    if (kind[1] === "done") {
      this.halt("Done. Click a word to see where it came from.");
      Object.assign(this.viewer.data, { says: data.says, silent: data.silent });
      this.viewer.differences(data.differs);
      this.viewer.wrong(data.wrong);
      if (this.viewer.follow) this.viewer.first(); // open at the biggest change, unless the reader has chosen a step
      this.save.href = `api/page/${data.run}`;
      this.save.hidden = false;
    }
    if (kind[1] === "error") { this.halt(); this.say(data.text, true); }
  }
}
