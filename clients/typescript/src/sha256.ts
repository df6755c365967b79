/** SHA-256 (FIPS 180-4). Of its own, because browsers have crypto.subtle on secure origins alone, and no stream of it. */
export function sha256(data: Uint8Array): Uint8Array {
  const state = INITIAL.slice();
  const words = new Uint32Array(64);
  const tail = padded(data);
  const whole = data.length - (data.length % 64);
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  for (let at = 0; at < whole; at += 64) block(state, words, view, at);
  for (let at = 0; at < tail.byteLength; at += 64) block(state, words, tail, at);
  const digest = new Uint8Array(32);
  const out = new DataView(digest.buffer);
  state.forEach((word, i) => {
    out.setUint32(4 * i, word);
  });
  return digest;
}

export function hex(data: Uint8Array): string {
  return Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The last bytes that fill no block, a one bit, zeros, and the length in bits. */
function padded(data: Uint8Array): DataView {
  const rest = data.subarray(data.length - (data.length % 64));
  const tail = new Uint8Array(rest.length < 56 ? 64 : 128);
  tail.set(rest);
  tail[rest.length] = 0x80;
  const view = new DataView(tail.buffer);
  view.setBigUint64(tail.length - 8, BigInt(data.length) * 8n);
  return view;
}

function block(state: Uint32Array, words: Uint32Array, data: DataView, at: number): void {
  for (let i = 0; i < 16; i++) words[i] = data.getUint32(at + 4 * i);
  for (let i = 16; i < 64; i++) {
    const x = words[i - 15] as number;
    const y = words[i - 2] as number;
    const low = rotate(x, 7) ^ rotate(x, 18) ^ (x >>> 3);
    const high = rotate(y, 17) ^ rotate(y, 19) ^ (y >>> 10);
    words[i] = (words[i - 16] as number) + low + (words[i - 7] as number) + high;
  }
  let [a, b, c, d, e, f, g, h] = state as unknown as [number, number, number, number, number, number, number, number];
  for (let i = 0; i < 64; i++) {
    const choice = (e & f) ^ (~e & g);
    const mixed = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const first = (h + mixed + choice + (CONSTANTS[i] as number) + (words[i] as number)) | 0;
    const second = ((rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => {
    state[i] = (state[i] as number) + word;
  });
}

function rotate(word: number, by: number): number {
  return (word >>> by) | (word << (32 - by));
}

/** The first 32 bits of the fractional part of roots of the first primes. */
function roots(count: number, root: (x: number) => number): Uint32Array {
  const found: number[] = [];
  for (let n = 2; found.length < count; n++) {
    if (isPrime(n)) found.push(Math.floor((root(n) % 1) * 2 ** 32));
  }
  return Uint32Array.from(found);
}

function isPrime(n: number): boolean {
  for (let i = 2; i * i <= n; i++) if (n % i === 0) return false;
  return true;
}

const INITIAL = roots(8, Math.sqrt);
const CONSTANTS = roots(64, Math.cbrt);
