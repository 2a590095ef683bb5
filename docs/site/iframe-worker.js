/* The search of the site, which runs in a worker: options such as --set, and pages that were opened from a folder. */

/* A browser starts no worker for a page from a folder. A hidden frame takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = address;
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve));
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

/* To the search engine, -word means "without this word", and word:word is one of a field. To us they are options and settings. */
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) {
  const query = typeof message.data === "string";
  post.call(this, query ? { ...message, data: message.data.replace(/[-+~^:]+/g, " ") } : message);
};
