// The networks of benchmarks/_small_models.py in TensorFlow.js, with plain gradient descent. `tf` is
// given, with the back end set. Batch norm keeps no running statistics here.
import { batchOf, timed } from "./timing.mjs";

function parts(tf) {
  const variable = (shape, scale) => tf.variable(tf.randomNormal(shape, 0, scale));
  const fill = (size, value) => tf.variable(tf.fill([size], value));
  const dense = (inputs, outputs) => {
    const w = variable([inputs, outputs], inputs ** -0.5), b = fill(outputs, 0);
    return (x) => tf.add(tf.matMul(x, w), b);
  };
  const wide = (inputs, outputs) => { // on the last of three axes
    const layer = dense(inputs, outputs);
    return (x) => tf.reshape(layer(tf.reshape(x, [-1, inputs])), [x.shape[0], x.shape[1], outputs]);
  };
  const convolution = (inputs, outputs, size, stride = 1, bias = false) => {
    const w = variable([size, size, inputs, outputs], (inputs * size * size) ** -0.5);
    const b = bias ? fill(outputs, 0) : null;
    return (x) => {
      const y = tf.conv2d(x, w, stride, "same");
      return b ? tf.add(y, b) : y;
    };
  };
  const depthwise = (channels, stride) => {
    const w = variable([3, 3, channels, 1], 1 / 3);
    return (x) => tf.depthwiseConv2d(x, w, stride, "same");
  };
  const norm = (channels, axes) => {
    const scale = fill(channels, 1), shift = fill(channels, 0);
    return (x) => {
      const { mean, variance } = tf.moments(x, axes, true);
      const y = tf.mul(tf.sub(x, mean), tf.rsqrt(tf.add(variance, 1e-5)));
      return tf.add(tf.mul(y, scale), shift);
    };
  };
  return { variable, dense, wide, convolution, depthwise, norm };
}

const chain = (...layers) => (x) => layers.reduce((y, layer) => layer(y), x);

function networks(tf) {
  const { variable, dense, wide, convolution, depthwise, norm } = parts(tf);
  const relu = (x) => tf.relu(x), images = [0, 1, 2];
  const pool = (x) => tf.maxPool(x, 2, 2, "valid");
  const flat = (x) => tf.reshape(x, [x.shape[0], -1]);
  const transformer = () => {
    const [tokens, length, width, heads] = [64, 32, 64, 4];
    const table = variable([tokens, width], 1), position = variable([length, width], 0.01);
    const mask = tf.keep(tf.tensor2d(Array.from({ length }, (_, row) =>
      Array.from({ length }, (_, column) => (column > row ? -1e9 : 0)))));
    const split = (x) =>
      tf.transpose(tf.reshape(x, [x.shape[0], length, heads, width / heads]), [0, 2, 1, 3]);
    const layer = () => {
      const [query, key, value, out] = [0, 1, 2, 3].map(() => wide(width, width));
      const up = wide(width, 4 * width), down = wide(4 * width, width);
      const norms = [norm(width, [2]), norm(width, [2])];
      return (x) => {
        const y = norms[0](x);
        const scores = tf.mul(tf.matMul(split(query(y)), split(key(y)), false, true),
          (width / heads) ** -0.5);
        const read = tf.matMul(tf.softmax(tf.add(scores, mask)), split(value(y)));
        const merged = tf.reshape(tf.transpose(read, [0, 2, 1, 3]), [x.shape[0], length, width]);
        const z = tf.add(x, out(merged));
        return tf.add(z, down(relu(up(norms[1](z)))));
      };
    };
    const body = chain(layer(), layer(), norm(width, [2]), wide(width, tokens));
    return (x) => tf.reshape(body(tf.add(tf.gather(table, x), position)), [-1, tokens]);
  };
  const separable = (inputs, outputs, stride) => chain(
    depthwise(inputs, stride), norm(inputs, images), relu,
    convolution(inputs, outputs, 1), norm(outputs, images), relu);
  return {
    mlp: () => chain(dense(784, 128), relu, dense(128, 10)),
    digits: () => chain(
      convolution(1, 32, 3), norm(32, images), relu,
      convolution(32, 64, 3), norm(64, images), relu,
      pool, flat, (x) => tf.dropout(x, 0.3), dense(1024, 10)),
    convolutions: () => chain(
      convolution(3, 16, 3, 1, true), relu, convolution(16, 32, 3, 1, true), relu, pool,
      convolution(32, 32, 3, 1, true), relu, pool, flat, dense(2048, 10)),
    transformer,
    mobilenet: () => chain(
      convolution(3, 16, 3), norm(16, images), relu,
      separable(16, 32, 1), separable(32, 64, 2), separable(64, 64, 1), separable(64, 128, 2),
      separable(128, 128, 1), (x) => tf.mean(x, [1, 2]), dense(128, 10)),
  };
}

/** Times training steps of a network. */
export async function timeTensorFlow(tf, network, seconds) {
  const forward = networks(tf)[network.name]();
  const optimizer = tf.train.sgd(0.05);
  const { input, target } = batchOf(network);
  const [rows, ...rest] = network.shape;
  const shape = rest.length === 3 ? [rows, rest[1], rest[2], rest[0]] : network.shape;
  const x = network.tokens
    ? tf.tensor(Int32Array.from(input, Number), shape, "int32") : tf.tensor(input, shape);
  const y = tf.oneHot(tf.tensor1d(Int32Array.from(target, Number), "int32"), network.classes);
  return timed(async () => {
    const loss = optimizer.minimize(() => tf.losses.softmaxCrossEntropy(y, forward(x)), true);
    const [value] = await loss.data();
    loss.dispose();
    return value;
  }, seconds, 1, 1);
}
