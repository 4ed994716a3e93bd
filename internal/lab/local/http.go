package local

import (
	"context"
	"io"
	"net/http"
	"strings"
)

// Answer is the answer of an HTTP server.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Request sends a request with a body of JSON, and with headers: names and values in turn.
func Request(ctx context.Context, method, url, body string, headers ...string) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return Answer{resp.StatusCode, resp.Header, answer}, err
}
