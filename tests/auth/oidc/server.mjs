// An authorization server on a free loopback port, moved by lines on its standard input:
//   rotate  a new signing key is added and used; the old ones stay published
//   retire  only the newest signing key stays published
//   fail    every answer is 503
//   heal    answers are answers again
// Each command is acknowledged with a line `done COMMAND`; the first line is `issuer URL`. Other
// lines are the library's own.

import { generateKeyPairSync, randomUUID } from 'node:crypto';
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import Provider from 'oidc-provider';

const JWT_RESOURCE = 'https://consignee.test/ahp/uploads';
const OPAQUE_RESOURCE = 'https://opaque.consignee.test/ahp/uploads';
const ALGORITHM = process.argv[2] ?? 'RS256';

const credentialsClient = (id, tenant) => ({
  client_id: id,
  client_secret: `${id}-secret`,
  grant_types: ['client_credentials'],
  redirect_uris: [],
  response_types: [],
  id_token_signed_response_alg: ALGORITHM,
  scope: 'ahp.upload refs.read',
  tenant,
});

function signingKey() {
  const { privateKey } = ALGORITHM.startsWith('ES')
    ? generateKeyPairSync('ec', { namedCurve: 'P-256' })
    : generateKeyPairSync('rsa', { modulusLength: 2048 });
  return { ...privateKey.export({ format: 'jwk' }), kid: randomUUID(), use: 'sig', alg: ALGORITHM };
}

const resourceServer = (format) => ({
  scope: 'ahp.upload refs.read',
  audience: format === 'jwt' ? JWT_RESOURCE : OPAQUE_RESOURCE,
  accessTokenFormat: format,
  accessTokenTTL: 3600,
  ...(format === 'jwt' && { jwt: { sign: { alg: ALGORITHM } } }),
});

function build(issuer, keys) {
  const provider = new Provider(issuer, {
    jwks: { keys },
    scopes: ['ahp.upload', 'refs.read'],
    cookies: { keys: ['unused-but-required'] },
    clients: [
      credentialsClient('agent', 'acme'),
      credentialsClient('stranger', 'globex'),
      credentialsClient('consignee', 'none'),
    ],
    extraClientMetadata: { properties: ['tenant'] },
    extraTokenClaims: (ctx, token) => ({ tenant: token.client?.tenant }),
    features: {
      devInteractions: { enabled: false },
      clientCredentials: { enabled: true },
      introspection: { enabled: true },
      revocation: { enabled: true },
      resourceIndicators: {
        enabled: true,
        getResourceServerInfo: (ctx, resource) =>
          resourceServer(resource === OPAQUE_RESOURCE ? 'opaque' : 'jwt'),
      },
    },
  });
  return provider.callback();
}

let keys = [signingKey()];
let failing = false;
let answer;

const server = createServer((request, response) => {
  if (failing) {
    response.writeHead(503).end('down');
  } else {
    answer(request, response);
  }
});

server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  answer = build(issuer, keys);
  const commands = {
    rotate: () => {
      keys = [signingKey(), ...keys];
      answer = build(issuer, keys);
    },
    retire: () => {
      keys = keys.slice(0, 1);
      answer = build(issuer, keys);
    },
    fail: () => { failing = true; },
    heal: () => { failing = false; },
  };
  const input = createInterface({ input: process.stdin });
  input.on('line', (line) => {
    commands[line]();
    console.log(`done ${line}`);
  });
  // The tests are gone when the input ends: so is the server.
  input.on('close', () => process.exit(0));
  console.log(`issuer ${issuer}`);
});
