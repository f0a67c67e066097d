// The samples of an evaluation: a list that is filtered, and one sample with the answers of all methods side by side.
class SampleBrowser {
  constructor(root, data) {
    this.data = data; this.now = -1; this.kept = []; this.drawn = 0;
    const option = (value, text) => make("option", { value }, text);
    const changed = () => this.filter();
    this.benchmark = make("select", { id: "benchmark", "aria-label": "Benchmark", onchange: changed }, option("", "All benchmarks"), ...data.benchmarks.map((name) => option(name, name)));
    this.benchmark.hidden = data.benchmarks.length < 2;
    const several = new Set(data.columns.map((column) => column.model)).size > 1;
    const short = data.columns.map((column) => (several ? `${column.model} · ${column.name}` : column.name));
    this.names = short.map((name, c) => (short.indexOf(name) === short.lastIndexOf(name) ? name : `${name} (${data.columns[c].settings || "defaults"})`));
    this.wrong = make("select", { id: "wrong", "aria-label": "Which method is wrong", onchange: changed }, option("", "Right or wrong"),
      ...this.names.flatMap((name, c) => [option(`${c}`, `${name} is wrong`), option(`${c}only`, `only ${name} is wrong`)]));
    this.questions = {}; // of each benchmark, every one once
    data.samples.forEach((sample) => (this.questions[sample.b] ??= new Set()).add(sample.q));
    this.disagree = make("input", { type: "checkbox", id: "disagree", onchange: changed });
    this.text = make("input", { type: "search", id: "text", placeholder: "Search questions and answers", "aria-label": "Search", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(changed, 120); } });
    this.count = make("p", { class: "count", role: "status", "aria-live": "polite" });
    this.list = make("ul", { class: "list", "aria-label": "Samples" });
    this.list.addEventListener("scroll", () => { if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 400) this.more(); });
    this.detail = make("section", { class: "detail", "aria-label": "Sample" });
    root.append(make("div", { class: "samples" }, make("div", { class: "side" },
      make("div", { class: "filters" }, this.benchmark, make("label", {}, this.disagree, "methods disagree"), this.wrong, this.text, this.count),
      ...data.notes.map((note) => make("p", { class: "notes" }, note)), this.dots(), this.list), this.detail));
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.goToHash());
    this.filter();
  }

  dots() { // what the marks at the right of each row stand for
    return make("p", { class: "notes" }, "At the right of each row: ", this.names.join(", "), " (", make("span", { class: "dot" }), " right, ", make("span", { class: "dot bad" }), " wrong).");
  }

  matches(sample, wanted) {
    if (wanted.benchmark && sample.b !== wanted.benchmark) return false;
    if (wanted.disagree && !sample.d) return false;
    if (wanted.wrong !== "") {
      const column = parseInt(wanted.wrong, 10), answer = sample.a[column];
      if (!answer || !answer.bad) return false;
      if (wanted.wrong.endsWith("only") && Object.entries(sample.a).some(([c, other]) => Number(c) !== column && other.bad)) return false;
    }
    return !wanted.text || `${sample.i} ${sample.q} ${sample.t || ""} ${Object.values(sample.a).map((answer) => answer.x).join(" ")}`.toLowerCase().includes(wanted.text);
  }

  filter() {
    const wanted = { benchmark: this.benchmark.value, disagree: this.disagree.checked, wrong: this.wrong.value, text: this.text.value.trim().toLowerCase() };
    const shown = this.kept[this.now];
    this.kept = [];
    this.data.samples.forEach((sample, number) => { if (this.matches(sample, wanted)) this.kept.push(number); });
    this.count.textContent = `${this.kept.length.toLocaleString("en")} of ${this.data.samples.length.toLocaleString("en")} samples, ordered by id`;
    this.list.replaceChildren(); this.drawn = 0; this.now = -1;
    this.more();
    if (!this.kept.length) return this.detail.replaceChildren(make("p", {}, "No sample is like that."));
    if (!this.goToHash()) this.select(Math.max(0, this.kept.indexOf(shown)));
  }

  more() { // rows are made as they are scrolled to
    const end = Math.min(this.kept.length, this.drawn + 150);
    for (; this.drawn < end; this.drawn++) {
      const at = this.drawn, sample = this.data.samples[this.kept[at]];
      const dots = this.names.map((name, c) => (sample.a[c] ? this.dot(sample.a[c], `${name}: `) : null));
      this.list.append(make("li", {}, make("button", { type: "button", onclick: () => this.select(at) }, make("span", { class: "id" }, this.data.benchmarks.length > 1 ? `${sample.b} ${sample.i}` : sample.i),
        make("span", { class: "what" }, (this.questions[sample.b].size === 1 && sample.t) || sample.q), ...dots)));
    }
  }

  select(at) {
    if (at < 0 || at >= this.kept.length) return;
    while (this.drawn <= at) this.more();
    if (this.now >= 0 && this.list.children[this.now]) this.list.children[this.now].firstChild.removeAttribute("aria-current");
    this.now = at;
    const row = this.list.children[at].firstChild;
    row.setAttribute("aria-current", "true");
    row.scrollIntoView({ block: "nearest" });
    const sample = this.data.samples[this.kept[at]];
    const address = `#sample=${encodeURIComponent(`${sample.b}:${sample.i}`)}`;
    if (window.location.hash !== address) try { window.history.replaceState(null, "", address); } catch (error) { /* not allowed in a frame */ }
    this.show(sample);
  }

  goToHash() {
    const named = new URLSearchParams(window.location.hash.slice(1)).get("sample");
    const at = named ? this.kept.findIndex((number) => `${this.data.samples[number].b}:${this.data.samples[number].i}` === named) : -1;
    if (at >= 0 && at !== this.now) this.select(at);
    return at >= 0;
  }

  show(sample) {
    const facts = make("div", { class: "facts" }, make("h2", {}, `${sample.b} · ${sample.i}`), make("p", {}, sample.q || "The question is not known."));
    if (sample.t) facts.append(make("p", { class: "truth" }, "Truth: ", make("b", {}, sample.t)));
    if (sample.cmd) facts.append(make("details", {}, make("summary", {}, "See this answer token by token: run this command"), make("code", { class: "command" }, sample.cmd)));
    const columns = this.names.map((name, c) => (sample.a[c] ? this.column(name, this.data.columns[c].settings, sample.a[c]) : null));
    this.detail.replaceChildren(make("div", { class: "head" }, ...sample.p.map((src) => make("img", { src, alt: "Picture of the sample", loading: "lazy" })), facts), make("div", { class: "columns" }, ...columns));
    this.detail.scrollTop = 0;
  }

  dot(answer, name) {
    const state = answer.partial ? ["dot open", `not scored, ${answer.partial} answers`] : answer.bad ? ["dot bad", "wrong"] : ["dot", "right"];
    return make("span", { class: state[0], title: name + state[1] });
  }

  column(name, settings, answer) {
    const parts = [];
    let at = 0;
    for (const [start, end] of answer.w || []) { parts.push(answer.x.slice(at, start), make("mark", { title: "not in the picture" }, answer.x.slice(start, end))); at = end; }
    parts.push(answer.x.slice(at));
    const scores = Object.entries(answer.s || {}).map(([metric, value]) => `${metric} ${Number(value.toFixed(3))}`).join(" · ");
    return make("article", { class: `column${answer.bad ? " bad" : ""}` }, make("h3", {}, this.dot(answer, ""), answer.partial ? `${name} (partial: ${answer.partial} answers)` : name),
      settings ? make("p", { class: "scores" }, settings) : null, make("p", {}, ...parts), make("p", { class: "scores" }, scores, answer.c ? `${scores ? " · " : ""}${answer.c} of ${answer.n} steps changed` : ""));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.select(this.now + move);
  }
}
