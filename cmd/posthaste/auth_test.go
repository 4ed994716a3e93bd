package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
)

// A running process accepts a key printed by keygen after SIGHUP. The signal does not end the process.
func TestKeygenMakesKeysThatARunningAPITakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	file := filepath.Join(t.TempDir(), "keys")
	add := func(args ...string) string {
		t.Helper()
		r := w.once(append([]string{"keygen"}, args...)...)
		line, key := r.out, strings.TrimSpace(r.errOut)
		if r.code != 0 || strings.Count(line, "\n") != 1 || len(key) < 20 || strings.Contains(line, key) {
			t.Fatalf("exit %d: %q, %q", r.code, line, key)
		}
		f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = f.WriteString(line)
		}
		must(t, errors.Join(err, f.Close()))
		return key
	}
	first := add("--user=*", "--name=shop", "--scopes=read", "--expires=2999-01-01")
	c := w.spawn("serve", "--auth=keys", "--auth-keys-file="+file)
	takes := func(key string) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			url := c.http + "/orders?user_id=0b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e22"
			a, err := testenv.Request(t.Context(), http.MethodGet, url, "", "Authorization", "Bearer "+key)
			return testenv.FailIf(err != nil || a.Status != http.StatusOK, "status %d, %w", a.Status, err)
		})
	}
	takes(first)
	second := add("--user=*")
	c.signal(syscall.SIGHUP)
	takes(second)
	takes(first)
	w.once("keygen", "--user=nobody").oneLine(t, 2, "neither a user id nor *")
	w.once("keygen", "--user=*", "--name=a b").oneLine(t, 2, "space")
	c.stop()
}

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
	c.waitReady("")
	if got := post(c, token); got != http.StatusCreated {
		t.Errorf("a token: %d", got)
	}
	if got := post(c, token[:len(token)-8]+"AAAAAAAA"); got != http.StatusUnauthorized {
		t.Errorf("another signature: %d", got)
	}
	issuer.Close()
	late := w.spawn("serve", append(claims, "--jwt-jwks="+issuer.URL)...)
	late.waitUnready("jwks")
	if got := post(late, token); got != http.StatusServiceUnavailable {
		t.Errorf("without the issuer: %d", got)
	}
	w.once(append([]string{"serve", "--jwt-jwks=http://issuer.example"}, claims...)...).oneLine(t, 2, "--jwt-jwks")
}
