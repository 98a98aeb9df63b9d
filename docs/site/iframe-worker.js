// Browsers start no Worker from file://. There the search's script runs in a hidden frame, so that a site in a folder
// is searched without a network. (The site's builder would fetch a script of this name from another host.)
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.onmessage?.(new MessageEvent("message", { data: structuredClone(data) }));
      const script = inner.document.createElement("script");
      this.loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
      });
      this.loaded.catch((event) => this.onerror?.(event));
      script.src = url;
      inner.document.body.append(script);
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.loaded.then(() => inner.onmessage(new MessageEvent("message", { data: structuredClone(data) })), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
