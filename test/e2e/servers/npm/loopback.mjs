// Preloaded before servers that listen on all interfaces and cannot be told
// otherwise (server-everything): tests stay on loopback.
import { Server } from 'node:net';

const { listen } = Server.prototype;
Server.prototype.listen = function (port, ...rest) {
  const open = !Number.isNaN(Number(port)) && typeof rest[0] !== 'string';
  return open ? listen.call(this, port, '127.0.0.1', ...rest) : listen.call(this, port, ...rest);
};
