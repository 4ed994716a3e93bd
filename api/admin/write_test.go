package admin_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"posthaste/api/admin"
)

// A value that JSON cannot represent is an error of the server, not an answer.
func TestAnAnswerThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	admin.Answer(w, http.StatusOK, time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC))
	if w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), `"detail"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
