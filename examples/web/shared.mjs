// What the pages share. examples/web_page.py puts trainer.mjs before it, the part of the page after
// it, and the files of the page into FILES. The page's part has guess(), which shows the network's
// answer to the drawing.

const FILES = {/* files */};
const PIXELS = 64;
const find = (id) => document.getElementById(id);

let trainer, controller = null, losses = [], times = [];
let strokes = [], isDown = false, pen = { x: 0.5, y: 0.15 };

/** Returns the bytes of a text of base64 with gzip. */
async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function tell(text, isWrong = false) {
  find("message").textContent = text;
  find("message").classList.toggle("wrong", isWrong);
}

/** Runs an action of the visitor; an error is told on the page. */
async function guarded(action) {
  try {
    tell("");
    await action();
  } catch (error) {
    tell(error.message, true);
  }
}

function random(count) {
  return Math.floor(Math.random() * count);
}

function shuffled(list) {
  const own = list.slice();
  for (let i = own.length - 1; i > 0; --i) {
    const k = random(i + 1);
    [own[i], own[k]] = [own[k], own[i]];
  }
  return own;
}

// Training

/** Returns the probabilities of the first rows of logits. */
function probabilitiesOf(logits, classes, count) {
  return Array.from({ length: count }, (_, row) => {
    const own = Array.from(logits.subarray(row * classes, (row + 1) * classes));
    const most = Math.max(...own), powers = own.map((value) => Math.exp(value - most));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((value) => value / sum);
  });
}

function noted({ loss, milliseconds }) {
  losses.push(loss);
  if (milliseconds !== undefined) times.push(milliseconds);
  showNumbers();
}

function showNumbers() {
  find("loss").textContent = losses.length ? losses.at(-1).toFixed(3) : "–";
  find("steps").textContent = trainer.counters.steps;
  const recent = times.slice(-50).sort((a, b) => a - b);
  find("time").textContent = recent.length ? `${recent[recent.length >> 1].toFixed(1)} ms` : "–";
  showCurve();
}

function showCurve() {
  const top = Math.max(2.5, ...losses.map((loss) => Math.min(loss, 5)));
  const right = Math.max(50, losses.length - 1);
  const height = (loss) => (230 - 220 * Math.min(loss, top) / top).toFixed(1);
  const path = (values) =>
    values.map((value, i) => `${(600 * i / right).toFixed(1)},${height(value)}`).join(" ");
  const means = losses.map((_, i) => {
    const own = losses.slice(Math.max(0, i - 9), i + 1);
    return own.reduce((a, b) => a + b) / own.length;
  });
  find("curve").innerHTML = [0, 0.5, 1, 2].map((loss) =>
    `<line class="grid" x1="0" x2="600" y1="${height(loss)}" y2="${height(loss)}"/>`).join("") +
    `<polyline class="each" points="${path(losses)}"/>` +
    `<polyline class="mean" points="${path(means)}"/>`;
  [...find("scale").children].forEach((mark) => {
    mark.style.top = `${100 * height(Number(mark.textContent)) / 240}%`;
  });
}

/** Shows the numbers of answers (columns) to samples of each class (rows). */
function showConfusion(counts, names, text) {
  const head = element("tr");
  head.append(element("td", "", { style: "background:none" }));
  for (const name of names) head.append(element("th", name, { scope: "col", title: name }));
  const rows = counts.map((row, label) => {
    const made = element("tr"), sum = row.reduce((a, b) => a + b) || 1;
    made.append(element("th", names[label], { scope: "row", title: names[label] }));
    row.forEach((count, answer) => made.append(element("td", count || "", {
      class: count && answer !== label ? "wrong" : "", style: `--share:${count / sum}` })));
    return made;
  });
  find("confusion").replaceChildren(element("caption", text), head, ...rows);
}

// Drawing

const paper = find("paper"), ink = paper.getContext("2d");

/** Returns the 8 x 8 counts of a drawing, as the digits of others are made: the drawing fills a
 * bitmap of 32 x 32, whose blocks of 4 x 4 are counted. */
function pixelsOf(drawing) {
  const points = drawing.flat(), xs = points.map((p) => p.x), ys = points.map((p) => p.y);
  const left = Math.min(...xs), right = Math.max(...xs);
  const top = Math.min(...ys), bottom = Math.max(...ys);
  const scale = 27 / Math.max(right - left, bottom - top, 0.2);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 32;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const place = ({ x, y }) => [
    16 + (x - (left + right) / 2) * scale, 16 + (y - (top + bottom) / 2) * scale];
  draw(context, drawing, place, 4);
  const { data } = context.getImageData(0, 0, 32, 32), pixels = new Float32Array(PIXELS);
  for (let y = 0; y < 32; ++y) {
    for (let x = 0; x < 32; ++x) {
      if (data[4 * (32 * y + x) + 3] > 127) pixels[8 * (y >> 2) + (x >> 2)] += 1 / 16;
    }
  }
  return pixels;
}

function draw(context, drawing, place, width) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  for (const stroke of drawing) {
    context.beginPath();
    context.moveTo(...place(stroke[0]));
    for (const point of stroke) context.lineTo(...place(point));
    context.stroke();
  }
}

function showPaper() {
  const colour = getComputedStyle(document.documentElement);
  ink.clearRect(0, 0, paper.width, paper.height);
  ink.strokeStyle = colour.getPropertyValue("--ink");
  draw(ink, strokes, ({ x, y }) => [x * paper.width, y * paper.height], 36);
  if (document.activeElement === paper) {
    ink.fillStyle = colour.getPropertyValue("--accent");
    ink.beginPath();
    ink.arc(pen.x * paper.width, pen.y * paper.height, isDown ? 16 : 9, 0, 7);
    ink.fill();
  }
}

function clear() {
  strokes = [];
  isDown = false;
  guess();
}

function pointOf(event) {
  const box = paper.getBoundingClientRect();
  return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
}

paper.addEventListener("pointerdown", (event) => {
  paper.setPointerCapture?.(event.pointerId);
  pen = pointOf(event);
  isDown = true;
  strokes.push([pen]);
  guess();
});
paper.addEventListener("pointermove", (event) => {
  if (!isDown || event.buttons === 0) return;
  pen = pointOf(event);
  strokes.at(-1).push(pen);
  showPaper();
});
for (const name of ["pointerup", "pointercancel"]) {
  paper.addEventListener(name, () => { isDown = false; guess(); });
}
paper.addEventListener("focus", showPaper);
paper.addEventListener("blur", () => { isDown = false; showPaper(); });

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
paper.addEventListener("keydown", (event) => {
  if (event.key === " ") {
    isDown = !isDown;
    if (isDown) strokes.push([{ ...pen }]);
  } else if (MOVES[event.key]) {
    const inside = (value) => Math.min(0.97, Math.max(0.03, value));
    const [x, y] = MOVES[event.key];
    pen = { x: inside(pen.x + x / 20), y: inside(pen.y + y / 20) };
    if (isDown) strokes.at(-1).push({ ...pen });
  } else {
    return;
  }
  event.preventDefault();
  guess();
});
// Elements, files and the theme

function element(name, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Offers bytes or a text as a file. */
function download(content, name) {
  const address = URL.createObjectURL(new Blob([content]));
  element("a", "", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1e4);
}

find("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  showPaper();
});
