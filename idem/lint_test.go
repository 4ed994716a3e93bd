package idem

import (
	"regexp"
	"strings"
	"testing"
)

var (
	commandRE = regexp.MustCompile(`redis\.p?call\(\s*([^,)]*)\s*(?:,\s*([^,)]*))?`)
	keysRE    = regexp.MustCompile(`KEYS\[[^]]*\]`)
)

// lintScript says what in a script's text a cluster would refuse or could not route: a command on anything but the one
// declared key, or one that has no key and is not known to need none.
func lintScript(text string) (faults []string) {
	for _, c := range commandRE.FindAllStringSubmatch(text, -1) {
		switch name, key := strings.Trim(c[1], `'"`), strings.TrimSpace(c[2]); {
		case !strings.HasPrefix(c[1], "'"):
			faults = append(faults, "a command that is computed: "+c[0])
		case name == "TIME":
		case key != "KEYS[1]":
			faults = append(faults, "another key: "+c[0])
		}
	}
	for _, k := range keysRE.FindAllString(text, -1) {
		if k != "KEYS[1]" {
			faults = append(faults, "a second key: "+k)
		}
	}
	// Another way to a command than the calls above.
	for rest := range strings.SplitSeq(commandRE.ReplaceAllString(text, ""), "\n") {
		code, _, _ := strings.Cut(rest, "--")
		for _, word := range []string{"redis", "server.", "KEYS[", "loadstring", "_G"} {
			if strings.Contains(code, word) {
				faults = append(faults, word+" outside a call: "+strings.TrimSpace(rest))
			}
		}
	}
	return faults
}

func TestScriptsTouchOnlyTheirDeclaredKey(t *testing.T) {
	t.Parallel()
	for _, name := range scriptNames {
		b, err := luaFiles.ReadFile("lua/" + name + ".lua")
		must(t, err)
		if faults := lintScript(string(b)); len(faults) > 0 {
			t.Errorf("%s: %q", name, faults)
		}
		for _, bad := range []string{
			"redis.call('GET',KEYS[2])", "redis.call('GET','other')", "redis.pcall('DEL',KEYS[1]..':x')",
			"redis.call(ARGV[1],KEYS[1])", "local c=redis.call c('GET','x')", "redis.call('SET',ARGV[1],1)",
			"redis.call('FLUSHALL')",
		} {
			if len(lintScript(string(b)+bad)) == 0 {
				t.Errorf("%s: %s was not noticed", name, bad)
			}
		}
	}
}
