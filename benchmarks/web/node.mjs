// node node.mjs KIND NETWORK SECONDS MODELS PEERS: times a network in Node, and prints JSON. KIND is
// relax_grad, or a back end of TensorFlow.js, of which PEERS has the packages.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { timeTensorFlow } from "./tensorflow.mjs";
import { batchOf, timeOurs } from "./timing.mjs";

const [kind, text, seconds, models, peers] = process.argv.slice(2);
const network = JSON.parse(text);

async function time() {
  if (kind === "relax_grad") {
    const folder = `${models}/${network.name}`;
    const { open } = await import(pathToFileURL(`${folder}/trainer.mjs`));
    return timeOurs(open, folder, batchOf(network), Number(seconds));
  }
  const require = createRequire(`${peers}/`);
  const tf = require("@tensorflow/tfjs");
  if (kind === "wasm") {
    require("@tensorflow/tfjs-backend-wasm").setThreadsCount(1);
  }
  if (!(await tf.setBackend(kind))) throw new Error(`the back end ${kind} is not available`);
  await tf.ready();
  return timeTensorFlow(tf, network, Number(seconds));
}

const log = console.log;
console.log = console.warn = () => {}; // the advice of TensorFlow.js
try {
  log(JSON.stringify(await time()));
} catch (error) {
  log(JSON.stringify({ error: String(error.message ?? error).slice(0, 300) }));
}
process.exit();
