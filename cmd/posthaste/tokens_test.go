package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// A process accepts the tokens of the configured issuer. It also starts while the issuer is unreachable.
func TestServeTakesTokens(t *testing.T) {
	t.Parallel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: &key.PublicKey, KeyID: "k"}}}
	issuer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(set)
	}))
	t.Cleanup(issuer.Close)
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key},
		(&jose.SignerOptions{}).WithHeader("kid", "k"))
	must(t, err)
	token, err := jwt.Signed(signer).Claims(map[string]any{
		"iss": "shop", "aud": "orders", "uid": uuid.NewString(), "exp": time.Now().Add(time.Hour).Unix(),
		"scp": []string{"order"},
	}).Serialize()
	must(t, err)
	w := newWorld(t)
	claims := []string{
		"--auth=jwt", "--jwt-issuer=shop", "--jwt-audience=orders", "--jwt-user-claim=uid", "--jwt-scope-claim=scp",
	}
	post := func(c *child, token string) int {
		t.Helper()
		a, err := testenv.Request(t.Context(), http.MethodPost, c.http+"/orders", `{"amount":1,"currency":"USD"}`,
			"Authorization", "Bearer "+token, "Idempotency-Key", uuid.NewString())
		must(t, err)
		return a.Status
	}
	c := w.spawn("serve", append(claims, "--jwt-jwks="+issuer.URL)...)
	c.waitReady(t, http.StatusOK, "", 30*time.Second)
	if got := post(c, token); got != http.StatusCreated {
		t.Errorf("a token: %d", got)
	}
	if got := post(c, token[:len(token)-8]+"AAAAAAAA"); got != http.StatusUnauthorized {
		t.Errorf("another signature: %d", got)
	}
	issuer.Close()
	late := w.spawn("serve", append(claims, "--jwt-jwks="+issuer.URL)...)
	late.waitReady(t, http.StatusServiceUnavailable, "jwks", 30*time.Second)
	if got := post(late, token); got != http.StatusServiceUnavailable {
		t.Errorf("without the issuer: %d", got)
	}
	w.once(append([]string{"serve", "--jwt-jwks=http://issuer.example"}, claims...)...).oneLine(t, 2, "--jwt-jwks")
}
