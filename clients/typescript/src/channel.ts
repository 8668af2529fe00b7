// Where a server is and how the connection to it is kept and secured.

import { readFileSync } from "node:fs";

import { type ChannelCredentials, credentials, Metadata, type ChannelOptions } from "@grpc/grpc-js";

export const DEFAULT_ADDRESS = "127.0.0.1:50051";

/** How a client proves who it is, and how it knows its server. */
export interface Access {
  /** Sent with every call, as `authorization: Bearer KEY`. Without `tls` it can be read on the way. */
  apiKey?: string | undefined;
  /** Whether to encrypt and to check the server's certificate; an object names the files to do it with. */
  tls?: boolean | TlsFiles | undefined;
}

/** Paths of PEM files. */
export interface TlsFiles {
  /** The authorities to trust. Unset: those that Node brings. */
  rootCertificates?: string | undefined;
  /** The certificate to show, for servers that ask for one. */
  clientCertificate?: string | undefined;
  /** Its private key. */
  clientKey?: string | undefined;
}

/** The address as it was given. Throws a RangeError unless it is HOST:PORT or unix:PATH. */
export function checkAddress(address: string): string {
  const port = Number(/^(?:\[[0-9a-fA-F:.%]+\]|[^\s:/[\]]+):([0-9]{1,5})$/.exec(address)?.[1]);
  if (/^unix:.+/.test(address) || (port > 0 && port < 65536)) return address;
  throw new RangeError(
    `address is ${JSON.stringify(address)}; it must be the server's gRPC address, HOST:PORT or unix:PATH, ` +
      `such as ${DEFAULT_ADDRESS}`,
  );
}

/** Keepalive so that an idle or long stream lives, quick reconnection, and no size limit but the server's. */
export function channelOptions(address: string): ChannelOptions {
  const isOurs = /^(unix:|localhost:|127\.|\[::1\])/.test(address);
  return {
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    // A proxy from the environment is not used for addresses of this machine.
    ...(isOurs ? { "grpc.enable_http_proxy": 0 } : {}),
  };
}

/** The credentials of a channel. Reads the files that `tls` names. */
export function channelCredentials(tls: Access["tls"]): ChannelCredentials {
  if (!tls) return credentials.createInsecure();
  const files = tls === true ? {} : tls;
  const [roots, key, chain] = [files.rootCertificates, files.clientKey, files.clientCertificate].map((path) =>
    path === undefined ? null : readFileSync(path),
  );
  return credentials.createSsl(roots, key, chain);
}

/** Metadata of every call. */
export function callMetadata(apiKey: string | undefined): Metadata {
  const metadata = new Metadata();
  if (apiKey) metadata.set("authorization", `Bearer ${apiKey}`);
  return metadata;
}
