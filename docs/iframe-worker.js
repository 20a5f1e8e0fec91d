// What the site's search runs in. It reads "--clip-grad" as "clip-grad": to the search's engine a dash means "without".
// A page that was opened from the disk may start no worker: there a hidden frame takes its place.
class Frame extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.loaded = new Promise((resolve) => (frame.onload = () => resolve(frame.contentWindow)));
    this.loaded.then((inner) => (inner.postMessage = answer));
    document.body.append(Object.assign(frame, { hidden: true, srcdoc: `<script src="${url}"></script>` }));
  }
  postMessage(data) {
    this.loaded.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
  }
}
window.Worker = class extends (location.protocol === "file:" ? Frame : Worker) {
  postMessage({ type, data }) {
    super.postMessage({ type, data: typeof data === "string" ? data.replace(/(^|\s)-+/g, "$1") : data });
  }
};
