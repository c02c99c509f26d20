// Visits a page in a frame, and posts what was found there.
export const waited = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
export const until = async (condition, what) => {
  for (let i = 0; i < 3000; ++i, await waited(20)) if (condition()) return;
  throw new Error(`${what} did not come`);
};

/** Opens a page, calls an action with what a visitor can do there, and posts its result. */
export async function visit(name, action) {
  try {
    await post(await action(await open(name)));
  } catch (error) {
    await post({ error: String(error.stack ?? error) });
  }
}

const post = (found) => fetch("result", { method: "POST", body: JSON.stringify(found) });

async function open(name) {
  const frame = document.createElement("iframe");
  frame.style = "border:0;height:900px;width:1400px";
  frame.src = name;
  document.body.append(frame);
  await until(() => frame.contentDocument?.documentElement?.dataset.state === "ready", "the page");
  const inner = frame.contentWindow, page = frame.contentDocument, root = page.documentElement;
  const find = (id) => page.getElementById(id), text = (id) => find(id).textContent;
  const paper = find("paper");
  paper.setPointerCapture = undefined; // events of scripts have no pointer to capture
  const press = (key, target = page.body) => target.dispatchEvent(
    new inner.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  return {
    inner, root, find, text, paper, press,
    steps: () => Number(text("steps")),
    hasInk: () => paper.getContext("2d").getImageData(0, 0, paper.width, paper.height).data
      .some((value) => value),
    message: () => [text("message"), find("message").classList.contains("wrong")],

    /** Returns the widths at which the page is wider. */
    async wide() {
      const found = [];
      for (const width of [400, 1400]) {
        frame.style.width = `${width}px`;
        await waited(50);
        if (root.scrollWidth > width) found.push([width, root.scrollWidth]);
      }
      return found;
    },

    /** Returns the colours in light and after a change of the theme. */
    colors() {
      const color = () => inner.getComputedStyle(root).colorScheme;
      if (color() === "dark") find("theme").click();
      const first = color();
      find("theme").click();
      return [first, color()];
    },

    /** Draws a stroke by the mouse through points from 0 to 1. */
    stroke(points) {
      const box = paper.getBoundingClientRect();
      const send = (type, [x, y]) => paper.dispatchEvent(new inner.PointerEvent(type, {
        clientX: box.left + x * box.width, clientY: box.top + y * box.height, buttons: 1,
        bubbles: true }));
      send("pointerdown", points[0]);
      for (const point of points) send("pointermove", point);
      send("pointerup", points.at(-1));
    },

    /** Draws an angle by the keys of the paper. */
    strokeByKeys() {
      paper.focus();
      press(" ", paper);
      for (let i = 0; i < 5; ++i) press("ArrowRight", paper);
      for (let i = 0; i < 10; ++i) press("ArrowDown", paper);
      press(" ", paper);
      paper.blur();
    },

    /** Returns the bytes that a button offers as a download. */
    async download(id) {
      let blob;
      const { createObjectURL } = inner.URL;
      inner.URL.createObjectURL = (given) => { blob = given; return "#"; };
      find(id).click();
      await until(() => blob, "the download");
      inner.URL.createObjectURL = createObjectURL;
      return new Uint8Array(await blob.arrayBuffer());
    },

    /** Uploads files, an object of contents by their names. */
    upload(contents) {
      const files = new inner.DataTransfer();
      for (const [file, content] of Object.entries(contents)) {
        files.items.add(new inner.File([content], file));
      }
      find("load").files = files.files;
      find("load").dispatchEvent(new inner.Event("change"));
    },
  };
}

export const base64 = (bytes) =>
  btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
