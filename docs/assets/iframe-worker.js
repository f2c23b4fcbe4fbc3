// Search asks a web worker, and browsers start none for a page that was opened from the disk. There, the worker's script runs in
// a hidden frame instead. The search plugin looks for a script of this name, and would else load one from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.post = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`search cannot load ${url}`));
        inside.document.head.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.post(data);
    }
  };
}
