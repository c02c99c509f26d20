// Times training steps: the samples of a function that runs one step, for some seconds.

/** Calls step until `seconds` have passed, at least `least` times after `warm` calls. */
export async function timed(step, seconds, warm = 3, least = 3) {
  const samples = [];
  let first, last;
  const begin = performance.now();
  const spent = () => (performance.now() - begin) / 1e3;
  for (let i = 0; i < warm + least || spent() < seconds; ++i) {
    const start = performance.now();
    last = await step();
    first ??= last;
    samples.push(performance.now() - start);
    if (spent() > 8 * seconds) break; // a slow one is measured by few steps
  }
  const kept = samples.slice(Math.min(warm, samples.length - 1)).sort((a, b) => a - b);
  return { least: kept[0], median: kept[kept.length >> 1], steps: samples.length, first, last };
}

/** Times the steps of an exported folder. */
export async function timeOurs(open, source, batch, seconds) {
  const trainer = await open(source);
  const [input, target] = Object.keys(trainer.batch[0]);
  const given = { [input]: batch.input, [target]: batch.target };
  return timed(() => trainer.step(given).loss, seconds);
}

/** Returns the inputs and targets of a network, as benchmarks/web.py describes them. */
export function batchOf(network) {
  const count = network.shape.reduce((a, b) => a * b, 1);
  const rows = network.tokens ? count : network.shape[0];
  const input = network.tokens
    ? BigInt64Array.from({ length: count }, (_, i) => BigInt((i * 7) % network.tokens))
    : Float32Array.from({ length: count }, (_, i) => ((i * 7919) % 1000) / 1000);
  const target = BigInt64Array.from({ length: rows }, (_, i) => BigInt(i % network.classes));
  return { input, target };
}
