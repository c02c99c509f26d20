// The page of index.html. examples/web_page.py puts trainer.mjs before it, and the files of the
// exported folder and the digits into FILES.

const FILES = {/* files */};
const ROWS = 32, PIXELS = 64, CLASSES = 10, HELD_OUT = 360, EPOCHS = 3, LESSON = 8;
const find = (id) => document.getElementById(id);
const NO_STROKES = "Draw a digit first.";

/** Returns the bytes of a text of base64 with gzip. */
async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const [manifest, module, state, digits] = await Promise.all(
  ["manifest", "module", "state", "digits"].map((name) => unpacked(FILES[name])));
// Each digit is 64 counts from 0 to 16, and its class.
const others = Array.from({ length: digits.length / (PIXELS + 1) }, (_, i) => {
  const own = digits.subarray(i * (PIXELS + 1), (i + 1) * (PIXELS + 1));
  const pixels = Float32Array.from(own.subarray(0, PIXELS), (count) => count / 16);
  return { pixels, label: own[PIXELS] };
});
const heldOut = others.splice(-HELD_OUT);

let trainer, controller = null, losses = [], times = [], mine = [];
let strokes = [], isDown = false, pen = { x: 0.5, y: 0.15 };

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

// Data

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

function batchOf(samples) {
  const input = new Float32Array(ROWS * PIXELS), target = new Array(ROWS).fill(0);
  samples.forEach(({ pixels, label }, i) => {
    input.set(pixels, i * PIXELS);
    target[i] = label ?? 0;
  });
  return { input, target };
}

/** Yields the batches of an epoch: each digit of others once, and drawings in a quarter of rows. */
function* batchesOf() {
  const source = find("builtin").checked ? shuffled(others) : [];
  if (!source.length && !mine.length) throw new Error(`There is no data. ${NO_STROKES}`);
  const count = source.length ? Math.floor(source.length / ROWS) : 2 * LESSON;
  for (let i = 0; i < count; ++i) yield mixed(source.slice(i * ROWS, (i + 1) * ROWS));
}

function mixed(samples) {
  const own = samples.slice(), drawings = own.length ? ROWS / 4 : ROWS;
  for (let i = 0; mine.length && i < drawings; ++i) own[ROWS - 1 - i] = mine[random(mine.length)];
  return batchOf(own);
}

// The network

function probabilities(samples) {
  const [{ data }] = trainer.predict({ input: batchOf(samples).input });
  return samples.map((_, row) => {
    const logits = Array.from(data.subarray(row * CLASSES, (row + 1) * CLASSES));
    const most = Math.max(...logits), powers = logits.map((value) => Math.exp(value - most));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((value) => value / sum);
  });
}

function evaluate() {
  const counts = Array.from({ length: CLASSES }, () => new Array(CLASSES).fill(0));
  let right = 0;
  for (let i = 0; i < heldOut.length; i += ROWS) {
    const samples = heldOut.slice(i, i + ROWS);
    probabilities(samples).forEach((shares, row) => {
      const guess = shares.indexOf(Math.max(...shares));
      counts[samples[row].label][guess] += 1;
      right += guess === samples[row].label;
    });
  }
  find("accuracy").textContent = `${(100 * right / heldOut.length).toFixed(1)} %`;
  showConfusion(counts);
}

function noted({ loss, milliseconds }) {
  losses.push(loss);
  if (milliseconds !== undefined) times.push(milliseconds);
  showNumbers();
}

async function train(epochs = EPOCHS) {
  if (controller) {
    controller.abort();
    return;
  }
  await guarded(async () => {
    controller = new AbortController();
    showBusy();
    try {
      trainer.setHyperparameter("lr", Number(find("rate").value));
      trainer.setCounters({ batch: 0 }); // an epoch that was stopped begins again
      const { signal } = controller, last = trainer.counters.epoch + epochs;
      const batches = () => batchesOf();
      // Each epoch ends with the digits that the network has not seen.
      while (trainer.counters.epoch < last && !signal.aborted) {
        await trainer.fit(batches, { signal });
        evaluate();
        guess();
      }
    } finally {
      controller = null;
      showBusy();
    }
  });
}

function steps(count) {
  return guarded(async () => {
    if (controller) return; // the epoch that runs has new drawings too
    trainer.setHyperparameter("lr", Number(find("rate").value));
    for (let i = 0; i < count; ++i) {
      const rows = find("builtin").checked ? ROWS : 0;
      const source = Array.from({ length: rows }, () => others[random(others.length)]);
      if (!source.length && !mine.length) throw new Error(`There is no data. ${NO_STROKES}`);
      const begin = performance.now(), result = trainer.step(mixed(source));
      noted({ ...result, milliseconds: performance.now() - begin });
    }
    evaluate();
    guess();
  });
}

function teach(label) {
  return guarded(async () => {
    if (!strokes.length) throw new Error(NO_STROKES);
    mine.push({ pixels: pixelsOf(strokes), label });
    const noun = mine.length === 1 ? "drawing" : "drawings";
    find("mine").textContent = `${mine.length} ${noun} of yours.`;
    await steps(LESSON);
  });
}

async function restart(bytes) {
  await guarded(async () => {
    trainer.load(bytes);
    losses = [];
    times = [];
    showNumbers();
    evaluate();
    guess();
  });
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

function guess() {
  showPaper();
  const shares = strokes.length ? probabilities([{ pixels: pixelsOf(strokes) }])[0] : [];
  const best = shares.indexOf(Math.max(...shares));
  find("guess").textContent = best < 0 ? "" : `The network sees a ${best}.`;
  [...find("bars").querySelectorAll("i")].forEach((bar, digit) => {
    bar.style.setProperty("--share", shares[digit] ?? 0);
    const text = shares.length ? `${Math.round(100 * shares[digit])} %` : "";
    bar.nextElementSibling.textContent = text;
    bar.previousElementSibling.classList.toggle("best", digit === best);
  });
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
addEventListener("keydown", (event) => {
  const isOther = event.ctrlKey || event.altKey || event.metaKey;
  if (isOther || event.target.matches?.("select, input")) return;
  const key = event.key.toLowerCase();
  if (key >= "0" && key <= "9" && key.length === 1) teach(Number(key));
  else if (key === "t") train();
  else if (key === "s") steps(1);
  else if (key === "delete" || key === "backspace") clear();
});

// What the page shows

function element(name, content = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = content;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
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

function showConfusion(counts) {
  const head = element("tr");
  head.append(element("td", "", { style: "background:none" }));
  for (let digit = 0; digit < CLASSES; ++digit) head.append(element("th", digit, { scope: "col" }));
  const rows = counts.map((row, label) => {
    const made = element("tr"), sum = row.reduce((a, b) => a + b);
    made.append(element("th", label, { scope: "row" }));
    row.forEach((count, digit) => made.append(element("td", count || "", {
      class: count && digit !== label ? "wrong" : "", style: `--share:${count / sum}` })));
    return made;
  });
  const caption = element("caption", "Rows: the digit. Columns: the network's answer, for " +
    `${heldOut.length} digits that it has not seen.`);
  find("confusion").replaceChildren(caption, head, ...rows);
}

function showBusy() {
  document.documentElement.dataset.state = controller ? "training" : "ready";
  find("train").textContent = controller ? "Stop" : `Train ${EPOCHS} epochs`;
  find("train").disabled = false;
  for (const id of ["step", "save", "reset", "load"]) find(id).disabled = controller !== null;
}

for (let digit = 0; digit < CLASSES; ++digit) {
  find("bars").append(element("b", digit), element("i"), element("span"));
  const button = element("button", digit, { type: "button" });
  button.addEventListener("click", () => teach(digit));
  find("labels").append(button);
}
find("clear").addEventListener("click", clear);
find("train").addEventListener("click", () => train());
find("step").addEventListener("click", () => steps(1));
find("reset").addEventListener("click", () => restart(state));
find("save").addEventListener("click", () => guarded(async () => {
  const address = URL.createObjectURL(new Blob([trainer.save()]));
  element("a", "", { href: address, download: "state.safetensors" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1e4);
}));
find("load").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = "";
  if (file) await restart(new Uint8Array(await file.arrayBuffer()));
});
find("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  showPaper();
});

await guarded(async () => {
  trainer = await open({ manifest, module, state });
  trainer.addEventListener("progress", ({ detail }) => noted(detail));
  showNumbers();
  evaluate();
  guess();
  showBusy();
});
// index.html#train=2 begins at once.
const wanted = /train=(\d+)/.exec(location.hash);
if (wanted && trainer) await train(Number(wanted[1]));
