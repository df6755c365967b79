/** Pixels, row by row, four bytes each: red, green, blue, alpha. */
export interface Pixels {
  width: number;
  height: number;
  data: ArrayLike<number>;
}

/**
 * Peak signal-to-noise ratio over red, green and blue in dB: 10 * log10(255^2 / mean squared error), Infinity for equal
 * pictures. Null where the sizes differ.
 */
export function psnr(a: Pixels, b: Pixels): number | null {
  if (a.width !== b.width || a.height !== b.height || a.width * a.height === 0) return null;
  let sum = 0;
  for (let at = 0; at < a.data.length; at += 4) {
    for (let channel = 0; channel < 3; channel += 1) {
      const difference = (a.data[at + channel] ?? 0) - (b.data[at + channel] ?? 0);
      sum += difference * difference;
    }
  }
  const mean = sum / (a.width * a.height * 3);
  return mean === 0 ? Number.POSITIVE_INFINITY : 10 * Math.log10((255 * 255) / mean);
}

/** The pixels of a picture. Raises an Error where the browser cannot decode it. */
export async function pixelsOf(picture: Blob): Promise<Pixels> {
  const bitmap = await createImageBitmap(picture, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const canvas = document.createElement("canvas");
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  if (!pen) throw new Error("this browser draws no pictures in memory");
  pen.drawImage(bitmap, 0, 0);
  bitmap.close();
  return pen.getImageData(0, 0, canvas.width, canvas.height);
}
