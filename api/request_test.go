package api

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

func TestBodies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	body := func(fields string) string { return `{"user_id":"` + testUser + `",` + fields + `}` }
	pad := strings.Repeat(" ", MaxBody)
	good := orderJSON(1)
	for _, c := range []struct {
		name, body string
		status     int
		code       string
	}{
		{"empty", "", 415, "unsupported_media_type"},
		{"null", "null", 400, "invalid_json"},
		{"array", "[]", 400, "invalid_json"},
		{"text", `"x"`, 400, "invalid_json"},
		{"cut", `{"amount":1`, 400, "invalid_json"},
		{"trailing object", good + `{}`, 400, "invalid_json"},
		{"trailing word", good + ` x`, 400, "invalid_json"},
		{"trailing space", good + " \n\t", 201, ""},
		{"duplicate name", body(`"amount":1,"amount":1,"currency":"USD"`), 400, "invalid_json"},
		{"duplicate name, escaped", body(`"amount":1,"\u0061mount":1,"currency":"USD"`), 400, "invalid_json"},
		{"duplicate name, nested", body(`"amount":1,"currency":"USD","x":{"a":1,"a":2}`), 400, "invalid_json"},
		{"not UTF-8", body("\"amount\":1,\"currency\":\"US\xff\""), 400, "invalid_json"},
		{"byte order mark", "\ufeff" + good, 400, "invalid_json"},
		{"nested deeply", body(`"amount":1,"currency":"USD","x":` + strings.Repeat("[", 30000) +
			strings.Repeat("]", 30000)), 400, "invalid_json"},
		{"unknown field", body(`"amount":1,"currency":"USD","note":"x"`), 422, "validation_failed"},
		{"field in capitals", body(`"Amount":1,"currency":"USD"`), 422, "validation_failed"},
		{"no amount", body(`"currency":"USD"`), 422, "validation_failed"},
		{"no currency", body(`"amount":1`), 422, "validation_failed"},
		{"no user", `{"amount":1,"currency":"USD"}`, 422, "validation_failed"},
		{"user in braces", `{"user_id":"{` + testUser + `}","amount":1,"currency":"USD"}`, 422, "validation_failed"},
		{"user without dashes", `{"user_id":"` + strings.ReplaceAll(testUser, "-", "") +
			`","amount":1,"currency":"USD"}`, 422, "validation_failed"},
		{"amount null", body(`"amount":null,"currency":"USD"`), 422, "validation_failed"},
		{"amount 0", body(`"amount":0,"currency":"USD"`), 422, "validation_failed"},
		{"amount -0", body(`"amount":-0,"currency":"USD"`), 422, "validation_failed"},
		{"amount -1", body(`"amount":-1,"currency":"USD"`), 422, "validation_failed"},
		{"amount 1.0", body(`"amount":1.0,"currency":"USD"`), 422, "validation_failed"},
		{"amount 1e3", body(`"amount":1e3,"currency":"USD"`), 422, "validation_failed"},
		{"amount 1e400", body(`"amount":1e400,"currency":"USD"`), 422, "validation_failed"},
		{"amount 01", body(`"amount":01,"currency":"USD"`), 400, "invalid_json"},
		{"amount 2^53+1", body(`"amount":9007199254740993,"currency":"USD"`), 422, "validation_failed"},
		{"amount text", body(`"amount":"1","currency":"USD"`), 422, "validation_failed"},
		{"amount largest", body(`"amount":999999999999999,"currency":"USD"`), 201, ""},
		{"amount too large", body(`"amount":1000000000000000,"currency":"USD"`), 422, "validation_failed"},
		{"currency lower case", body(`"amount":1,"currency":"usd"`), 422, "validation_failed"},
		{"currency long", body(`"amount":1,"currency":"USDT"`), 422, "validation_failed"},
		{"currency with newline", body(`"amount":1,"currency":"USD\n"`), 422, "validation_failed"},
		{"64 KiB", good + pad[:MaxBody-len(good)], 201, ""},
		{"64 KiB and 1", good + pad[:MaxBody-len(good)+1], 413, "body_too_large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := *w
			w.tb = t
			r := w.post(newKey(), c.body)
			want(t, r, c.status, c.code)
			if c.code == "validation_failed" && !strings.Contains(r.body, `"pointer":"/`) {
				t.Errorf("no pointer in %v", r)
			}
		})
	}
}

func TestMediaTypes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for value, status := range map[string]int{
		"application/json": 201, "application/json; charset=utf-8": 201, "Application/JSON;charset=UTF-8": 201,
		"": 415, "text/plain": 415, "application/json; charset=latin1": 415, "application/problem+json": 415,
		"application/json;": 201,
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/orders",
			strings.NewReader(orderJSON(1)))
		must(t, err)
		req.Header.Set(idem.KeyHeader, newKey())
		if value != "" {
			req.Header.Set("Content-Type", value)
		}
		res, err := client.Do(req)
		must(t, err)
		_ = res.Body.Close()
		testenv.Equal(t, value, res.StatusCode, status)
	}
	want(t, w.post(newKey(), "\x1f\x8b", "Content-Encoding", "gzip"), 415, "unsupported_media_type")
}

func TestTraceHeaders(t *testing.T) {
	t.Parallel()
	const good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	for value, want := range map[string]string{
		good: good, "": "", "x": "", "ff" + good[2:]: "", strings.ToUpper(good): "", good + "-x": "",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": "",
		"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01": "",
	} {
		h := http.Header{}
		h.Set("Traceparent", value)
		testenv.Equal(t, value, traceHeaders(h)["traceparent"], want)
	}
	h := http.Header{"Traceparent": {good}, "Tracestate": {"a=1", "b=2"}}
	testenv.Equal(t, "headers", fmt.Sprint(traceHeaders(h)), "map[traceparent:"+good+" tracestate:a=1,b=2]")
}
