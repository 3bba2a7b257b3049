// An authorization server over TLS on a free loopback port: `server.mjs CERTIFICATE KEY AUDIENCE`.
// It gives tokens for the upload endpoints of this machine, each with AUDIENCE as its audience;
// whoever is sent to it is logged in and consents. Its first line is `issuer URL`.

import { generateKeyPairSync } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:https';
import { createInterface } from 'node:readline';
import Provider, { errors } from 'oidc-provider';

const [certificate, key, AUDIENCE] = process.argv.slice(2);
const ENDPOINT = /^https:\/\/127\.0\.0\.1:\d+\/ahp\/uploads$/;
const SCOPE = 'ahp.upload refs.read';

const { privateKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
const signing = { ...privateKey.export({ format: 'jwk' }), kid: 'one', use: 'sig', alg: 'ES256' };

function resourceServer(ctx, resource) {
  if (!ENDPOINT.test(resource)) {
    throw new errors.InvalidTarget();
  }
  return {
    scope: SCOPE,
    audience: AUDIENCE,
    accessTokenFormat: 'jwt',
    accessTokenTTL: 3600,
    jwt: { sign: { alg: 'ES256' } },
  };
}

const build = (issuer) => new Provider(issuer, {
  jwks: { keys: [signing] },
  scopes: SCOPE.split(' '),
  cookies: { keys: ['of-a-test'] },
  pkce: { required: () => true },
  clients: [
    {
      client_id: 'agent',
      client_secret: 'agent-secret/+',
      grant_types: ['client_credentials'],
      redirect_uris: [],
      response_types: [],
      id_token_signed_response_alg: 'ES256',
      scope: SCOPE,
    },
    {
      client_id: 'desk',
      token_endpoint_auth_method: 'none',
      grant_types: ['authorization_code', 'refresh_token'],
      redirect_uris: ['https://host.test/callback'],
      response_types: ['code'],
      id_token_signed_response_alg: 'ES256',
      scope: SCOPE,
    },
  ],
  extraTokenClaims: () => ({ tenant: 'acme' }),
  findAccount: (ctx, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  issueRefreshToken: () => true,
  interactions: { url: (ctx, interaction) => `/interaction/${interaction.uid}` },
  features: {
    devInteractions: { enabled: false },
    clientCredentials: { enabled: true },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: resourceServer,
      useGrantedResource: () => true,
    },
  },
});

async function consent(provider, { prompt, params, session }) {
  const grant = new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
  grant.addOIDCScope(params.scope);
  for (const [resource, scopes] of Object.entries(prompt.details.missingResourceScopes ?? {})) {
    grant.addResourceScope(resource, scopes.join(' '));
  }
  return { consent: { grantId: await grant.save() } };
}

async function interact(provider, request, response) {
  const details = await provider.interactionDetails(request, response);
  const result = details.prompt.name === 'login'
    ? { login: { accountId: 'user' } }
    : await consent(provider, details);
  await provider.interactionFinished(request, response, result);
}

let provider;

const server = createServer(
  { cert: readFileSync(certificate), key: readFileSync(key) },
  (request, response) => {
    if (request.url.startsWith('/interaction/')) {
      interact(provider, request, response).catch((error) => {
        console.error(error);
        response.writeHead(500).end();
      });
    } else {
      provider.callback()(request, response);
    }
  },
);

server.listen(0, '127.0.0.1', () => {
  const issuer = `https://localhost:${server.address().port}`;
  provider = build(issuer);
  // The tests are gone when the input ends: so is the server.
  createInterface({ input: process.stdin }).on('close', () => process.exit(0));
  console.log(`issuer ${issuer}`);
});
