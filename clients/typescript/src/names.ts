import type { DescEnum } from "@bufbuild/protobuf";
import { refused } from "./error.js";

/**
 * The number of an enum's value that is given by its name, such as "png", "PNG" or "IMAGE_FORMAT_PNG", or as a number.
 * Throws INVALID_ARGUMENT, by field, for one that does not exist: it would be sent as the default.
 */
export function named(field: string, schema: DescEnum, given: string | number): number {
  const names = schema.values.filter((value) => value.number !== 0);
  const prefix = schema.sharedPrefix?.toUpperCase() ?? "";
  const asked = typeof given === "string" ? given.toUpperCase() : given;
  const found = names.find(({ name, number }) => [name, name.slice(prefix.length), number].includes(asked));
  if (found) return found.number;
  const known = names.map(({ name }) => name.slice(prefix.length).toLowerCase());
  throw refused(field, `${JSON.stringify(given)} does not exist; it is one of ${known.join(", ")}`);
}
