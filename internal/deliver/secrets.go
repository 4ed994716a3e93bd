package deliver

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
)

// remedy makes a secret.
const remedy = `make one with: echo "whsec_$(openssl rand -base64 32)"`

// secrets are the keys in a file. The file is read for each request. While it cannot be used, the previous keys stay in
// use.
type secrets struct {
	path string
	log  *slog.Logger

	mu   sync.Mutex
	keys [][]byte
	// logged is the last error that was logged.
	logged string
}

// latest reads the file and returns the keys in use. Without a path there are none.
func (s *secrets) latest() [][]byte {
	if s.path == "" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	keys, err := readSecrets(s.path)
	switch {
	case err == nil:
		s.keys, s.logged = keys, ""
	case err.Error() != s.logged:
		s.logged = err.Error()
		s.log.Error("the changed file of secrets cannot be used; the previous secrets stay in use", "err", err)
	}
	return s.keys
}

// sign returns the signatures of a request, one for each secret; "" without secrets.
func (s *secrets) sign(id, timestamp string, body []byte) string {
	var all []string
	for _, key := range s.latest() {
		m := hmac.New(sha256.New, key)
		_, _ = fmt.Fprintf(m, "%s.%s.%s", id, timestamp, body) // writing to a hash never fails
		all = append(all, "v1,"+base64.StdEncoding.EncodeToString(m.Sum(nil)))
	}
	return strings.Join(all, " ")
}

// readSecrets reads one or two secrets, one a line. Its errors do not quote them.
func readSecrets(path string) (keys [][]byte, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: want a file that this user may read; %s", err, remedy)
	}
	lines := strings.Fields(string(text))
	if len(lines) == 0 {
		return nil, errors.New(path + " is empty; " + remedy)
	}
	if len(lines) > 2 {
		return nil, errors.New(path + " has more than two secrets; keep the new one and the one that it replaces")
	}
	for i, line := range lines {
		encoded, ok := strings.CutPrefix(line, "whsec_")
		if !ok {
			return nil, fmt.Errorf("secret %d in %s does not begin with whsec_; %s", i+1, path, remedy)
		}
		key, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(encoded, "="))
		if err != nil || len(key) == 0 {
			return nil, fmt.Errorf("secret %d in %s is not base64 after whsec_; %s", i+1, path, remedy)
		}
		keys = append(keys, key)
	}
	return keys, nil
}
