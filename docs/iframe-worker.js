// Browsers start no worker on a page opened from disk, and the search of the docs runs in one. There, a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        frame.contentDocument.body.append(script);
      });
    }
    async postMessage(data) {
      await this.ready;
      this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
