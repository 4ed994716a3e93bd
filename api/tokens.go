package api

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"
)

// scopeAnyUser is the scope of a service's token that may act for any user. It corresponds to * in a file of keys.
const scopeAnyUser = "any_user"

// skew is the tolerated difference between the clocks of the issuer and of this machine.
const skew = time.Minute

// algorithms are the accepted ones. All are asymmetric, so that a public key never serves as a shared secret.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512, jose.ES256, jose.ES384, jose.ES512,
	jose.EdDSA,
}

// TokenOptions define which tokens are valid and which claims name the user and scopes. Every field is required.
type TokenOptions struct {
	// Issuer is the claim iss, exactly.
	Issuer string
	// Audience is the claim aud, or one of its values.
	Audience string
	// JWKS is the location of the issuer's public keys; see CheckJWKS.
	JWKS string
	// UserClaim names the claim with the user's id, ScopeClaim the one with the scopes.
	UserClaim, ScopeClaim string
}

// Tokens verifies the access tokens (JWTs, RFC 9068) of one issuer. A token has the permissions of its scopes; without
// scopes it has none. Safe for concurrent use.
type Tokens struct {
	o    TokenOptions
	keys *issuerKeys
}

// NewTokens reads the keys if they are in a file. Server.Run reads those of a URL.
func NewTokens(o TokenOptions) (*Tokens, error) {
	if slices.Contains([]string{o.Issuer, o.Audience, o.UserClaim, o.ScopeClaim}, "") {
		return nil, errors.New("api: TokenOptions has an empty field")
	}
	keys, err := newIssuerKeys(o.JWKS)
	if err != nil {
		return nil, err
	}
	return &Tokens{o, keys}, nil
}

// refuse401 is the problem for an invalid token or key. detail must not quote the credential.
func refuse401(detail string) *problem { return &problem{kind: kindUnauthorized, detail: detail} }

// caller returns the sender with a token.
func (t *Tokens) caller(ctx context.Context, text string) (caller, *problem) {
	if text == "" {
		return caller{}, refuse401("")
	}
	token, err := jwt.ParseSigned(text, algorithms)
	if err != nil {
		return caller{}, refuse401("that is not a token with a signature of a known kind")
	}
	key, prob := t.keys.find(ctx, token)
	if prob != nil {
		return caller{}, prob
	}
	var claims jwt.Claims
	var all map[string]any
	if err := token.Claims(key, &claims, &all); err != nil {
		return caller{}, refuse401("the token's signature or form is not valid")
	}
	err = jwt.ErrExpired // unless the token names its end
	if claims.Expiry != nil {
		want := jwt.Expected{Issuer: t.o.Issuer, AnyAudience: jwt.Audience{t.o.Audience}}
		err = claims.ValidateWithLeeway(want, skew)
	}
	if err != nil {
		return caller{}, refuse401(faultOf(err))
	}
	return t.callerOf(&claims, all)
}

// faultOf is the error text for a client with an invalid token.
func faultOf(err error) string {
	switch {
	case errors.Is(err, jwt.ErrExpired):
		return "the token has expired, or never does"
	case errors.Is(err, jwt.ErrNotValidYet), errors.Is(err, jwt.ErrIssuedInTheFuture):
		return "the token is not valid yet"
	case errors.Is(err, jwt.ErrInvalidAudience):
		return "the token is for another audience"
	case errors.Is(err, jwt.ErrInvalidIssuer):
		return "the token is from another issuer"
	}
	return "the token is not valid"
}

// callerOf reads the claims of a valid token.
func (t *Tokens) callerOf(c *jwt.Claims, all map[string]any) (caller, *problem) {
	who := principal{scopes: []Scope{}} // never nil, which would permit everything
	for _, s := range words(all[t.o.ScopeClaim]) {
		if slices.Contains(scopes, Scope(s)) {
			who.scopes = append(who.scopes, Scope(s))
		}
		who.any = who.any || s == scopeAnyUser
	}
	out := caller{who: who, name: clientOf(all)}
	if who.any {
		out.limit = sha256.Sum256([]byte("subject " + c.Subject))
		return out, nil
	}
	text, _ := all[t.o.UserClaim].(string)
	user, ok := uuidOf(text)
	if !ok || user == uuid.Nil {
		return caller{}, refuse401("the token names no user: the claim " + t.o.UserClaim + " must be a UUID")
	}
	out.who.user, out.limit = user, sha256.Sum256([]byte("user "+user.String()))
	return out, nil
}

// words splits a claim: a text with spaces (RFC 8693) or a list. Other types have no words.
func words(claim any) []string {
	switch v := claim.(type) {
	case string:
		return strings.Fields(v)
	case []any:
		var list []string
		for _, w := range v {
			if s, ok := w.(string); ok {
				list = append(list, s)
			}
		}
		return list
	}
	return nil
}

// clientOf names the client program for logs. It returns "" if the name is missing or not a valid key name.
func clientOf(all map[string]any) string {
	for _, claim := range []string{"client_id", "azp"} {
		if name, ok := all[claim].(string); ok && isKeyName(name) {
			return name
		}
	}
	return ""
}
