package admin

import (
	"net/http"
	"net/http/pprof"
	"strconv"
)

// maxProfile is the longest profile in seconds.
const maxProfile = 30

// addProfiles serves the list of profiles and, if on, the profiles. It does not serve the command line, which may
// contain a password or a token.
func addProfiles(mux *http.ServeMux, a *Access, on bool) {
	mux.HandleFunc("GET /debug/pprof/{$}", a.reads(pprof.Index))
	profile := func(path string, h http.HandlerFunc) {
		mux.HandleFunc("GET /debug/pprof/"+path, a.reads(func(w http.ResponseWriter, r *http.Request) {
			if !on {
				Problem(w, http.StatusNotFound, "profiles are off; --admin-pprof=on turns them on")
				return
			}
			if s := r.FormValue("seconds"); s != "" {
				if n, err := strconv.ParseFloat(s, 64); err != nil || !(n >= 0 && n <= maxProfile) {
					Problem(w, http.StatusBadRequest, "a profile takes 30 seconds at most")
					return
				}
			}
			h(w, r)
		}))
	}
	profile("", pprof.Index)
	profile("profile", pprof.Profile)
	profile("symbol", pprof.Symbol)
	profile("trace", pprof.Trace)
}
